"""`python -m rlx`: the same as `rlx`."""

from rlx.cli.main import main

main()
