"""kvgen: from one YAML file that says where every byte of a KV cache lives, everything that touches that cache."""

__version__ = "0.1.0"
