"""The codes of what goes wrong around the layouts: files, folders, compilers, devices.

KV70x to KV71x: files and calls. KV72x: compiled kernels. KV73x: the harness. KV74x: benchmarks.
"""

from __future__ import annotations

from kvgen.catalog import CATALOG, Entry

ENVIRONMENT = frozenset(
    {"KV101", "KV701", "KV702", "KV704", "KV709", "KV710", "KV712", "KV713", "KV714", "KV715"}
    | {"KV742", "KV743", "KV744", "KV746"}
)
"""Codes that say the call or the machine is at fault, and nothing was found wrong: exit status 2."""

COMMANDS: dict[str, Entry] = {
    "KV701": Entry(
        title="There is no such layout",
        cause=(
            "A path does not exist, a folder holds no layout, or a link in it leads nowhere, or a name is not that of "
            "a layout here or shipped."
        ),
        example="$ kvgen show page_nhd",
        cure="Check the spelling; `kvgen list` names the layouts, `kvgen new NAME` starts one.",
    ),
    "KV702": Entry(
        title="A file or folder cannot be written",
        cause="The folder may not be written, the disk is full, or a part of the path is a file.",
        example="$ touch generated\n$ kvgen build paged_nhd",
        cure="Choose another folder with `--out`, or mend its permissions. Nothing was changed.",
    ),
    "KV703": Entry(
        title="A generated file was edited by hand",
        cause=(
            "The text of a generated module is not the one whose digest is in kvgen.manifest.json, so that building "
            "it anew would lose somebody's work."
        ),
        example="$ kvgen build paged_nhd\n$ echo '# mine' >> generated/paged_nhd.py\n$ kvgen build paged_nhd",
        cure="Move the change to the layout, or copy the file elsewhere; then build with `--force`.",
    ),
    "KV704": Entry(
        title="The manifest cannot be read",
        cause="kvgen.manifest.json beside the generated modules is damaged, by a merge perhaps.",
        example="$ kvgen build paged_nhd\n$ echo '<<<<<<<' > generated/kvgen.manifest.json\n$ kvgen build paged_nhd",
        cure="Restore it, or delete it and build with `--force`: it is written anew.",
    ),
    "KV705": Entry(
        title="A generated file is out of date",
        cause="The layout, or kvgen itself, has changed since the file was written.",
        example=(
            "$ kvgen new mine\n$ kvgen build\n"
            "$ sed -i 's/block_size: 16/block_size: 32/' layouts/mine.yaml\n$ kvgen build --check"
        ),
        cure="Run `kvgen build`.",
    ),
    "KV706": Entry(
        title="A generated file is missing",
        cause="A layout has never been built, or its module was deleted.",
        example="$ kvgen new mine\n$ kvgen build --check",
        cure="Run `kvgen build`.",
    ),
    "KV707": Entry(
        title="A generated file has no layout any more",
        cause="kvgen wrote the file for a layout that has since been deleted or renamed.",
        example="$ kvgen new mine\n$ kvgen new yours\n$ kvgen build\n$ rm layouts/yours.yaml\n$ kvgen build --check",
        cure="Run `kvgen build --clean`, or delete the file.",
    ),
    "KV708": Entry(
        title="Two layouts have one name",
        cause="Their modules would be one file. Names that differ in case alone are the same on some file systems.",
        example="$ kvgen new mine\n$ cp layouts/mine.yaml layouts/copy.yaml\n$ kvgen check",
        cure="Rename one of them.",
    ),
    "KV709": Entry(
        title="A file exists already",
        cause=(
            "`kvgen new` never overwrites a file. `kvgen show --svg`, `kvgen schema --out`, `kvgen bench --json` and "
            "`--plot` and `kvgen compile --update` overwrite nothing but what they may have written themselves."
        ),
        example="$ kvgen new mine\n$ kvgen new mine",
        cure="Choose another name, or delete the file.",
    ),
    "KV710": Entry(
        title="A name that nobody knows",
        cause="No code, no case of the harness, or no function that is timed, has that name.",
        example="$ kvgen explain KV999",
        cure="`kvgen explain` lists the codes; `kvgen test LAYOUT --output-format json` names cases that fail.",
    ),
    "KV711": Entry(
        title="The JSON Schema is out of date",
        cause="The language has changed since the file was written.",
        example="$ echo '{}' > schema.json\n$ kvgen schema --check --out schema.json",
        cure="Run `kvgen schema --out schema/layout.schema.json`.",
    ),
    "KV712": Entry(
        title="torch or triton is missing",
        cause="Layouts are built without either, but generated modules need both to run and to be compiled.",
        example="$ kvgen test paged_nhd  # where torch is not installed",
        cure="Install them, or kvgen with its extra `run`, which has both.",
    ),
    "KV713": Entry(
        title="There is no such device",
        cause="torch finds no GPU, or Triton's compilers do not know the one that was named.",
        example="$ kvgen test paged_nhd --device cuda  # where there is no GPU",
        cure="Test with `--device cpu`; benchmarks do all but the timing with `--dry-run`.",
    ),
    "KV714": Entry(
        title="matplotlib is missing",
        cause="Plots are drawn with it, and nothing else needs it.",
        example="$ kvgen bench paged_nhd --plot results.svg  # where matplotlib is not installed",
        cure="Install it, or kvgen with its extra `plot`.",
    ),
    "KV715": Entry(
        title="A function to be tested cannot be used",
        cause=(
            "What `--against` names is not there, fails when it is imported, stands in for no function of the layout's "
            "module, or is handed an argument that there is not."
        ),
        example="$ kvgen test paged_nhd --against nowhere:append",
        cure=(
            "Write `[FUNCTION=]MODULE:NAME`, and behind it in parentheses how it is called where its arguments are not "
            "those of the generated function. Any other difference takes a function of yours in between."
        ),
    ),
    "KV716": Entry(
        title="There is no plan between these layouts",
        cause=(
            "`kvgen plan` lists runs of bytes from one layout to another. Both hold the same streams, and their sizes "
            "are the same numbers. Heads are dealt evenly to ranks, or ranks evenly to heads. Where neither block size "
            "is a multiple of the other, tokens may go from block to block in more uneven steps than a plan can list."
        ),
        example="$ kvgen plan mla paged_nhd",
        cure="Copy a layout with `kvgen new NAME --like OTHER` and give it the sizes of the other side.",
    ),
    "KV721": Entry(
        title="A kernel does not compile",
        cause="A target's compiler refused a generated kernel. That is a mistake of kvgen's.",
        example="$ kvgen compile paged_nhd --target sm_90",
        cure="Report it, with the layout and the message.",
    ),
    "KV722": Entry(
        title="A kernel spills registers",
        cause="A program holds more values than its threads have registers, and keeps some in memory, which is slow.",
        example="$ kvgen compile paged_nhd --target sm_90",
        cure="Give the layout a smaller tile, or more warps, under `schedule:`.",
    ),
    "KV723": Entry(
        title="A kernel is not as the table of compiled kernels says",
        cause="Widths of accesses, spills, registers or shared memory have changed, or a kernel is not in the table.",
        example="$ kvgen compile --check",
        cure="If the change is meant, record it: `kvgen compile --update`. Widths should not shrink.",
    ),
    "KV731": Entry(
        title="A generated function does not do what the layout says",
        cause="A byte, a result or a refusal differs from that of the reference. The message says which came first.",
        example="$ kvgen test paged_nhd --against mine:append  # which does not skip -1",
        cure=(
            "The line after `again:` repeats the case alone. Modules are generated afresh, so the mistake is kvgen's; "
            "with `--against` it is that of the function under test."
        ),
    ),
    "KV741": Entry(
        title="A layout is not timed",
        cause="The harness finds that a generated function is wrong, and a wrong function is fast in vain.",
        example="$ kvgen bench paged_nhd",
        cure="`kvgen test LAYOUT` says what differs. `kvgen bench --no-check` times it all the same.",
    ),
    "KV742": Entry(
        title="An adapter cannot be imported",
        cause="`--adapter` names no module that Python finds, or nothing in it that can be called.",
        example="$ kvgen bench paged_nhd --adapter nowhere:append",
        cure="Write `module:function`, with the module in this folder or on PYTHONPATH.",
    ),
    "KV743": Entry(
        title="A file holds no results of a benchmark",
        cause="It was not written by `kvgen bench --json`, or by another version of kvgen.",
        example="$ python tools/make_benchmarks.py results.json",
        cure="Run `kvgen bench --json FILE` again.",
    ),
    "KV744": Entry(
        title="The device's memory is too small for a benchmark",
        cause="Pools are as large as in use, so that nothing stays in caches, and compared with a copy.",
        example="$ kvgen bench paged_nhd --pool-tokens 1000000000",
        cure="Take a smaller pool with `--pool-tokens`, or fewer tokens with `--tokens`.",
    ),
    "KV745": Entry(
        title="A schedule changes bytes",
        cause="A kernel that is divided among programs in another way does not write or read what the reference does.",
        example="$ kvgen tune paged_nhd",
        cure="Report it, with the layout and the message. That is a mistake of kvgen's.",
    ),
    "KV746": Entry(
        title="A layout's text cannot be edited",
        cause="The file is written so that its `schedule:` cannot be replaced line by line: as one flow mapping, say.",
        example="$ kvgen tune mine.yaml  # whose text is one flow mapping",
        cure="Write the keys of the layout one below the other, or put the schedule there by hand.",
    ),
}

ENTRIES = CATALOG | COMMANDS
"""Every code there is."""
