"""The catalogue of diagnostics: what each code means, how it comes about, and what to do.

KV1xx: the file and its YAML. KV2xx: keys, values and names. KV3xx: orders and what they cover. KV4xx: buffers and
records. KV5xx: transfers. Other parts of kvgen add entries of theirs to ``CATALOG``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """``example`` holds the lines of a layout that show the mistake, the rest of it being sound.

    Or it is a session: lines of a shell, each after ``$ ``, the last of which meets the mistake.
    """

    title: str
    cause: str
    example: str
    cure: str


CATALOG: dict[str, Entry] = {
    "KV101": Entry(
        title="A file cannot be read",
        cause="The file does not exist, is a folder, or may not be read.",
        example="$ mkdir pages\n$ kvgen show pages",
        cure="Check the path and its permissions.",
    ),
    "KV102": Entry(
        title="A file is too large to be a layout",
        cause="Layouts are a page of text; more than 256 KiB are not read.",
        example="$ head -c 300000 /dev/zero | tr '\\0' ' ' > large.yaml\n$ kvgen check large.yaml",
        cure="Check that the path is that of a layout.",
    ),
    "KV103": Entry(
        title="A file is no text",
        cause=(
            "The file holds bytes that are not UTF-8, or control characters: a binary file, or text in "
            "another encoding."
        ),
        example="$ printf 'name: \\377' > latin.yaml\n$ kvgen check latin.yaml",
        cure="Save the file as UTF-8.",
    ),
    "KV104": Entry(
        title="A file is empty",
        cause="There is nothing in the file but comments.",
        example="$ echo '# nothing yet' > empty.yaml\n$ kvgen check empty.yaml",
        cure="Begin with `name:`, or let `kvgen new` write a layout.",
    ),
    "KV105": Entry(
        title="A tab where YAML takes spaces",
        cause="YAML does not take tabs in indentation, nor between a key and its value where text is not quoted.",
        example=("axes:\n\t{head: 8, dim: 128}"),
        cure="Replace tabs by spaces.",
    ),
    "KV106": Entry(
        title="The text is no YAML",
        cause="A bracket or quote is not closed, a colon stands where none can, or lines are indented unevenly.",
        example="axes: {head: 8, dim: 128",
        cure="The message says what was expected; often the mistake is in the line before.",
    ),
    "KV107": Entry(
        title="A key is given twice",
        cause="One mapping has the same key twice. YAML readers take the last in silence.",
        example="axes: {head: 8, dim: 128, head: 4}",
        cure="Keep one of the two.",
    ),
    "KV108": Entry(
        title="An anchor, alias, merge key or tag",
        cause="`&name`, `*name`, `<<` and `!tag` are refused: a layout needs none.",
        example="axes: &sizes {head: 8, dim: 128}",
        cure="Write the value out. A stream that equals another is written `value: key`.",
    ),
    "KV109": Entry(
        title="Several documents in one file",
        cause="`---` begins a second document.",
        example=("name: first\n---\nname: second"),
        cure="One file is one layout.",
    ),
    "KV110": Entry(
        title="Nested too deeply",
        cause="More than 32 levels of YAML inside each other.",
        example="axes: [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]",
        cure="No layout needs this: check for brackets typed by accident.",
    ),
    "KV111": Entry(
        title="An ambiguous or huge number",
        cause=(
            "A number with a leading zero is octal in YAML 1.1 and decimal in YAML 1.2; a number of more than "
            "18 digits is no size."
        ),
        example="block_size: 010",
        cure="Write the number without the zero, or in quotes if it is text.",
    ),
    "KV201": Entry(
        title="An unknown key",
        cause="The language has no such key here.",
        example="blocksize: 16",
        cure="The help line names the nearest known key, or all of them.",
    ),
    "KV202": Entry(
        title="A key is missing",
        cause=(
            "Every layout has `name`, `block_size` and `buffers`; every place has either `holds` or `fields`; every "
            "`quant` has a `mode`, and but for mxfp8, mxfp4, nvfp4 and turbo a `per` in its scale."
        ),
        example=("buffers:\n  kv_cache: {order: block slot head dim}"),
        cure="Add the key.",
    ),
    "KV203": Entry(
        title="A value of the wrong kind",
        cause="A number where text belongs, a list where a mapping belongs, a size below one, and the like.",
        example="block_size: 16.5",
        cure="Write what the message expects.",
    ),
    "KV204": Entry(
        title="Not supported yet",
        cause=(
            "The word belongs to the language, but this version of kvgen does nothing with it: static scales "
            "over a zero, and `round: away` with a zero of kind `point`."
        ),
        example=("streams:\n  key: {quant: {mode: int4_asymmetric, scale: {per: [], source: static}}}\n  value: key"),
        cure="Do without it, or use a version that supports it.",
    ),
    "KV205": Entry(
        title="A name that cannot be used",
        cause=(
            "Names of layouts, streams, buffers, params and tables become names in generated Python: "
            "identifiers of ASCII letters, digits and `_`; no keywords, no names of axes, of generated "
            "functions or of their other arguments, and each once. The scale of a stream `key` is called `key_scale`, "
            "its zero `key_zero`. A layout is not called like a module of Python's own (`re`, `math`): the modules of "
            "its neighbours would import it instead."
        ),
        example=(
            "buffers:\n"
            "  slot_mapping: {holds: key, order: block slot head dim}\n"
            "  value_cache: {holds: value, order: block slot head dim}"
        ),
        cure="Choose another name.",
    ),
    "KV206": Entry(
        title="An unknown stream",
        cause=(
            "`holds`, a field, or `value: key` names a stream that `streams` does not define. Without "
            "`streams` there are `key` and `value`."
        ),
        example=(
            "buffers:\n"
            "  key_cache: {holds: keys, order: block slot head dim}\n"
            "  value_cache: {holds: value, order: block slot head dim}"
        ),
        cure="Correct the name, or add the stream to `streams`.",
    ),
    "KV207": Entry(
        title="A dtype that cannot be used",
        cause=(
            "The dtype is unknown, given twice, or of another size than the others of a stream that is stored as it "
            "comes: how many bytes a value takes is part of the layout. What is encoded may come in several sizes."
        ),
        example=("streams:\n  key: {dtype: [bfloat16, float32]}\n  value: key"),
        cure="Name dtypes of one size, or cast them with `store`; or write a second layout for another size.",
    ),
    "KV208": Entry(
        title="A stream without dim",
        cause="No extent of `dim` is given for a stream, neither in `axes` nor in the stream.",
        example="axes: {head: 8}",
        cure="Write `axes: {dim: 128}`, or `dim: 128` in the stream.",
    ),
    "KV209": Entry(
        title="A shard that does not fit the block size",
        cause="Tokens are dealt to ranks `interleave` at a time, and a block must hold whole deals.",
        example="slots: {shard: {world: 4, interleave: 3}}",
        cure="Choose an interleave that divides block_size; where block_size is dynamic, 1.",
    ),
    "KV210": Entry(
        title="An encoding that cannot be",
        cause=(
            "A stream has `store` and `quant` both, or `rotate` and neither, is cast to the one type it comes in, or "
            "takes values that are no float32, float16 or bfloat16."
        ),
        example=("streams:\n  key: {dtype: float16, store: float16}\n  value: key"),
        cure="Keep one of the two keys; leave `store` out where values are stored as they come.",
    ),
    "KV211": Entry(
        title="A key of an encoding that means nothing there",
        cause=(
            "The key says how something is done that is not done here: how a static scale is computed, how a dynamic "
            "one is handed in, how floats are rounded or clamped. Defaults may always be written."
        ),
        example=("streams:\n  key: {quant: {mode: fp8_e4m3, clamp: [-127, 127], scale: {per: []}}}\n  value: key"),
        cure="Leave the key out, or correct what the message says it depends on.",
    ),
    "KV212": Entry(
        title="Numbers past the codes of an encoding",
        cause="`range`, the code that the largest magnitude meets, or `clamp` is past the largest code there is.",
        example=(
            "streams:\n"
            "  key: {quant: {mode: fp8_e4m3, scale: {per: token, range: 500}}}\n"
            "  value: key\n"
            "buffers:\n"
            "  kv_cache: {holds: [key, value], order: block kv slot head dim}\n"
            "  scales: {holds: [key.scale, value.scale], order: block kv slot}"
        ),
        cure="Choose numbers that the codes reach; the default is the largest of them.",
    ),
    "KV213": Entry(
        title="A dynamic scale that blocks share",
        cause=(
            "A dynamic scale is computed from the values of tokens. Where tokens of all blocks share it, a later one "
            "would change the scale of those that are stored already, and their codes would have to be made anew. "
            "Where those of one block share it, the layout is sound, but there is no append."
        ),
        example=("streams:\n  key: {quant: {mode: fp8_e4m3, scale: {per: head, source: dynamic}}}\n  value: key"),
        cure="Let the scale vary over `token`, or hand it in: `source: static`.",
    ),
    "KV214": Entry(
        title="Dims that an encoding cannot take",
        cause=(
            "`rotate: hadamard` mixes all dims of a row, in tiles whose sides are powers of two: so is their number, "
            "which is known before launch, and so are the groups that share a scale. The modes with a codebook take "
            "whole groups of 16 dims."
        ),
        example=("streams:\n  key: {dim: 96, rotate: hadamard, store: float8_e4m3fn}\n  value: {}"),
        cure="Store the stream without the rotation, or in another mode.",
    ),
    "KV215": Entry(
        title="A scale that cannot be shared",
        cause=(
            "In the place of a scale stands the name of another stream, whose static scale it is. That must be an "
            "argument of the stream's own, of the type that the mode takes, over axes that both streams have alike."
        ),
        example=(
            "streams:\n"
            "  key: {quant: {mode: fp8_e4m3, scale: {per: token}}}\n"
            "  value: {quant: {mode: fp8_e4m3, scale: key}}"
        ),
        cure="Write the scale out, or name the stream that has it.",
    ),
    "KV220": Entry(
        title="A rotary embedding that does not fit",
        cause=(
            "Values are turned in pairs, so `rotary_dim` is even; it is at most `dim`; and the sections of `mrope` "
            "make as many pairs as it has."
        ),
        example="fuse:\n  key: [{rope: {rotary_dim: 130}}]",
        cure="Take the numbers from the model's configuration: `rotary_dim` is `dim` times its partial rotary factor.",
    ),
    "KV221": Entry(
        title="A stage where there can be none",
        cause=(
            "Stages work on rows of a constant `dim`, of float32, float16 or bfloat16 values, in streams that can be "
            "appended, each stage once; a norm adds up at most 8192 values."
        ),
        example="axes: {head: 8, dim: dynamic}\nfuse:\n  key: [rms_norm]",
        cure="Give `dim` a number; leave the stage out where the message says so.",
    ),
    "KV222": Entry(
        title="Parts of a fused append that do not go together",
        cause=(
            "`packed_qkv` needs to know its columns: a query, and streams with constant heads and dims of one type. "
            "All that take angles from a table share it. A query needs stages, unless it is there to "
            "be skipped in a packed tensor. `positions` and `norm` say nothing where no stage asks."
        ),
        example="fuse:\n  input: packed_qkv\n  key: [rope]",
        cure="The message says what is missing, or what to leave out.",
    ),
    "KV223": Entry(
        title="A function that the module does not have",
        cause=(
            "`functions` names those that a module is to have, and `kvgen build --only` those that some module here is "
            "to have. One of them is unknown, or rests on something that the layout has not: `append_fused` on a "
            "section `fuse`, `gather_codes` on an encoding, `append` on streams that can be appended."
        ),
        example="functions: [append, gathers]",
        cure="Check the spelling; without the key the module has all functions that it can have.",
    ),
    "KV301": Entry(
        title="A spelling mistake in an order",
        cause=(
            "An order is a list of terms such as `block`, `dim//8`, `slot%4`, `(block slot)` and `1`, with "
            "spaces between them. `per` of a scale is a list of axes, of `dim//32` and of `token//32`."
        ),
        example=("buffers:\n  kv_cache: {holds: [key, value], order: 'block, kv, slot, head, dim'}"),
        cure="Correct the term; the caret shows it.",
    ),
    "KV302": Entry(
        title="An unknown axis",
        cause=(
            "The axes are block, slot, token, head, dim, kv and layer; in a contiguous cache request and "
            "position stand for block and slot."
        ),
        example=("buffers:\n  kv_cache: {holds: [key, value], order: block kv slot hed dim}"),
        cure="Correct the name.",
    ),
    "KV303": Entry(
        title="A split that does not divide",
        cause=(
            "`axis//n` and `axis%n` cut an axis into equal parts, so n must divide what is left of it. Groups of a "
            "scale may leave a short one at the end; then they are not split further."
        ),
        example=("buffers:\n  kv_cache: {holds: [key, value], order: block kv head dim//48 slot dim%48}"),
        cure="Choose a number that divides the extent.",
    ),
    "KV304": Entry(
        title="A part of an axis is not covered",
        cause=(
            "Each value of a stream needs a place of its own: every axis of it, whole or in all its parts, "
            "must occur between the buffer and the stream."
        ),
        example=("buffers:\n  kv_cache: {holds: [key, value], order: block kv slot dim}"),
        cure="Add the missing term to an order.",
    ),
    "KV305": Entry(
        title="A part of an axis is covered twice",
        cause=(
            "Two terms above a stream cover the same part of an axis, or cut it in ways that do not fit together; or "
            "`per` names an axis twice."
        ),
        example=("buffers:\n  kv_cache: {holds: [key, value], order: block kv slot head dim//8 dim%16}"),
        cure="Remove one of the terms, or make the parts meet: `dim//8` goes with `dim%8`.",
    ),
    "KV306": Entry(
        title="An axis that a stream does not have",
        cause=(
            "A term above a stream names an axis over which it does not vary: a `head` above a stream with "
            "`head: none`, or above a scale per token. Or `per` names an axis that the stream has not."
        ),
        example=(
            "streams:\n"
            "  key: {head: none}\n"
            "  value: key\n"
            "buffers:\n"
            "  kv_cache: {holds: [key, value], order: block kv slot head dim}"
        ),
        cure="Move the term below, to the streams and scales that have the axis, or correct `per`.",
    ),
    "KV307": Entry(
        title="A pair that is none",
        cause=(
            "`holds: [a, b]` needs `kv` in an order above it, and two streams of equal axes, extents and "
            "dtypes; `kv` needs such a pair."
        ),
        example=("buffers:\n  kv_cache: {holds: [key, value], order: block slot head dim}"),
        cure="Add `kv` where the two are to alternate, or lay streams that differ out with `fields`.",
    ),
    "KV308": Entry(
        title="An extent known only at launch, where it cannot be",
        cause=(
            "How many blocks there are, and every `dynamic` extent, is read from a tensor dimension. Such an "
            "axis is not split; in parentheses `block` comes first, and a dynamic axis stands alone, but for "
            "`(block slot)` where another buffer has `slot` alone."
        ),
        example=(
            "axes: {head: dynamic, dim: 128}\n"
            "buffers:\n"
            "  kv_cache: {holds: [key, value], order: block kv slot (head dim)}"
        ),
        cure="Give the axis a dimension of its own, or an extent.",
    ),
    "KV309": Entry(
        title="An order that must be written",
        cause=(
            "A bare stream takes the one axis, or part of one, that nothing above it uses. Here more than one "
            "is left, so that their order is unknown."
        ),
        example=("buffers:\n  kv_cache: {order: block, fields: [key, value]}"),
        cure="Write the order: `{key: slot head dim}`.",
    ),
    "KV310": Entry(
        title="A term that differs between streams",
        cause=(
            "One order stands above several streams, and a term of it has not the same size or place in all of them."
        ),
        example=(
            "streams:\n"
            "  key: {dim: 128}\n"
            "  value: {dim: 64}\n"
            "buffers:\n"
            "  kv_cache: {order: block slot head dim//8, fields: [{key: dim%8}, {value: dim%8}]}"
        ),
        cure="Move the term into an order of each stream.",
    ),
    "KV311": Entry(
        title="An unknown param",
        cause="A term is split by a name that `params` does not define.",
        example=("buffers:\n  kv_cache: {holds: [key, value], order: block kv head dim//x slot dim%x}"),
        cure="Write the number, or define it: `params: {x: 8}`.",
    ),
    "KV312": Entry(
        title="Two vocabularies in one layout",
        cause="A layout says either block and slot, or request and position.",
        example=("buffers:\n  kv_cache: {holds: [key, value], order: request kv slot head dim}"),
        cure="Use one of the two throughout; `token` goes with both.",
    ),
    "KV313": Entry(
        title="Layers in some buffers only",
        cause="Generated functions take either the allocation of all layers or that of one, for all streams alike.",
        example=(
            "buffers:\n"
            "  key_cache: {holds: key, order: layer block slot head dim}\n"
            "  value_cache: {holds: value, order: block slot head dim}"
        ),
        cure="Give every stream the `layer` axis, or none.",
    ),
    "KV314": Entry(
        title="Codes that cannot share bytes",
        cause=(
            "Codes of four bits lie two in a byte, of two bits four, and eight of three bits in three bytes: those "
            "that follow each other in their order. They must be of one token and head, fill their bytes, and lie a "
            "power of two of dims apart; groups that share a scale must be a power of two of dims."
        ),
        example=(
            "streams:\n"
            "  key: {quant: {mode: int4, scale: {per: [], source: static}}}\n"
            "  value: {}\n"
            "buffers:\n"
            "  key_cache: {holds: key, order: block head dim slot}\n"
            "  value_cache: {holds: value, order: block slot head dim}"
        ),
        cure=("Let the order end in `dim`, or in a part of it: `dim//32 dim%16 dim//16%2` joins dims i and i + 16."),
    ),
    "KV401": Entry(
        title="A stream, a scale or a zero stored nowhere",
        cause="No buffer holds the stream, or the scale and the zero that belong to its codes.",
        example=("buffers:\n  key_cache: {holds: key, order: block slot head dim}"),
        cure="Name it in a buffer, or remove the stream from `streams`; a scale of the whole pool may be static.",
    ),
    "KV402": Entry(
        title="A scale stored in another number of places than its codes",
        cause=(
            "A stream may lie in several places: append writes all of them. Its scale and zero then lie in one place "
            "for all, or in one for each."
        ),
        example=(
            "streams:\n"
            "  key: {quant: {mode: int8, scale: {per: token}}}\n"
            "  value: {}\n"
            "buffers:\n"
            "  kv_cache: {order: block slot head, fields: [key, value]}\n"
            "  scales: {order: block slot, fields: [key.scale, key.scale]}"
        ),
        cure="Name it once, or as often as the codes.",
    ),
    "KV403": Entry(
        title="A buffer nobody fills",
        cause="A buffer, or a record in one, holds no stream.",
        example=(
            "buffers:\n"
            "  kv_cache: {holds: [key, value], order: block kv slot head dim}\n"
            "  spare: {order: block, fields: [{pad: 64}]}"
        ),
        cure="Name a stream in it, or remove it.",
    ),
    "KV404": Entry(
        title="A fill that several tokens would write",
        cause=(
            "Padding with `fill` is written together with its token, so the record around it must belong to one token."
        ),
        example=(
            "buffers:\n"
            "  kv_cache: {order: block, fields: [{key: slot head dim}, {value: slot head dim}, {pad: 64, fill: 0}]}"
        ),
        cure="Leave `fill` out, or move the padding into a record that repeats over `slot`.",
    ),
    "KV405": Entry(
        title="An extent known only at launch inside a record",
        cause="Offsets and strides inside a record are constants, so every extent there must be one.",
        example=("buffers:\n  kv_cache: {order: head, fields: [{key: block slot dim}, {value: block slot dim}]}"),
        cure="Move the axis to the order of the buffer, or give it an extent.",
    ),
    "KV406": Entry(
        title="A record too large",
        cause="Offsets inside a record are 32-bit numbers.",
        example=(
            "buffers:\n  kv_cache: {order: block slot, fields: [{key: head dim}, {value: head dim}, {pad: 2147483647}]}"
        ),
        cure="Divide the record between several buffers.",
    ),
    "KV407": Entry(
        title="A scale that is an argument, in a buffer",
        cause=(
            "A static scale that varies over neither block nor slot is handed to the generated functions. In a buffer "
            "lie the scales that vary over them."
        ),
        example=(
            "streams:\n"
            "  key: {quant: {mode: fp8_e4m3, scale: {per: head, source: static}}}\n"
            "  value: key\n"
            "buffers:\n"
            "  kv_cache: {order: block slot head, fields: [key, key.scale, value, value.scale]}"
        ),
        cure="Leave it out of the buffers, or let it vary over `token`.",
    ),
    "KV408": Entry(
        title="Regions that cannot be",
        cause=(
            "`regions: [layer]` says of a buffer that every layer is an allocation of its own, `[kv]` that each of a "
            "pair is. The axis is then in no order of it; what is said of layers is said of all buffers. There are no "
            "regions over other axes: what a stream has of a token lies in one allocation, in which slot numbers count."
        ),
        example=(
            "buffers:\n"
            "  key_cache: {holds: key, order: block slot head dim, regions: [layer]}\n"
            "  value_cache: {holds: value, order: block slot head dim}"
        ),
        cure="Say it of all buffers, and leave `layer` out of their orders.",
    ),
    "KV409": Entry(
        title="More than a program can hold",
        cause=(
            "Triton's blocks have at most 1048576 values. A program holds the whole `dim` of a token and head, all "
            "heads where they share a scale, as many tokens and heads as `schedule` says, and a whole padding that "
            "is filled; each counts as the next power of two."
        ),
        example="axes: {head: 8, dim: 2097152}",
        cure="Take fewer tokens or heads under `schedule`, or tell the dims apart by one more axis, `head` for one.",
    ),
    "KV501": Entry(
        title="A transfer without its layouts",
        cause=(
            "`from` and `to` name layouts: files beside the transfer's, in the folder above or in layouts/, or layouts "
            "that come with kvgen. `streams: from` in `to` takes the streams of the source."
        ),
        example="transfer: {from: paged_nhd, to: paged_nhdd}",
        cure="Check the spelling; `kvgen list` names the layouts.",
    ),
    "KV502": Entry(
        title="Sides of a transfer with other streams",
        cause="What is stored at the source must be stored at the destination, under the same names.",
        example="transfer: {from: paged_nhd, to: mla}",
        cure="Name two layouts of the same streams; `streams: from` gives the destination those of the source.",
    ),
    "KV503": Entry(
        title="Sides of a transfer of other sizes",
        cause=(
            "Streams of a transfer have the same head size on both sides, and heads on both or on neither; only the "
            "number of heads may differ. With `layers: all` both sides have the same number of layers."
        ),
        example="transfer: {from: paged_nhd, to: {layout: paged_hnd, axes: {dim: 64}}}",
        cure="Replace `axes` in the side that is to be like the other: `{layout: NAME, axes: {dim: 128}}`.",
    ),
    "KV504": Entry(
        title="A change of encoding that nobody allowed",
        cause=(
            "Bytes are moved as they are, and these would mean something else at the destination: another mode, "
            "another type, or scales that do not travel with the codes."
        ),
        example="transfer: {from: paged_nhd, to: nhd_fp8_token_head}",
        cure="Say `convert: requantise` to decode and encode anew, or `streams: from` to keep the encoding.",
    ),
    "KV505": Entry(
        title="Something stored that a transfer has no rule for",
        cause=(
            "A scale that tokens or heads share goes with all of them: it cannot follow some tokens of a block into a "
            "block of another size, nor some heads. One that is made anew of several tokens is made by a program that "
            "holds all of their values."
        ),
        example="transfer: {from: nhd_fp8_block_head, to: {layout: nhd_fp8_block_head, block_size: 64}}",
        cure="Give both sides one block size and the same heads, or let the scale vary over `token` and `head`.",
    ),
}
