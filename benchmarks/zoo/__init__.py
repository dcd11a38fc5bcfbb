"""Does sharpness predict on zoos of small transformers that were trained here; see ``python -m benchmarks.zoo -h``."""
