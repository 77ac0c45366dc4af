"""`python -m kvjax` is the program `kvjax`."""

from kvjax.programs.commands import main

if __name__ == "__main__":
  main()
