"""Programs of users, the commands of `kvjax`: all of scripts that a wheel carries."""

if __name__ != "kvjax.programs":
  raise ImportError(f"found {__name__}, expected kvjax.programs: the folder is a link there")
