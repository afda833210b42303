"""``python -m cudnn_autotune``: the command line."""

from cudnn_autotune_cli import main

main(prog_name="cudnn-autotune")
