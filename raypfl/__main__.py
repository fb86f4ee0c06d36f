"""`python -m raypfl`: the command line, where its script is not on the PATH."""

from raypfl.cli import main

main()
