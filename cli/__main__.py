"""``python -m hf_geosharp.cli`` is ``hf-geosharp``."""

from hf_geosharp.cli import main

main(prog_name="hf-geosharp")
