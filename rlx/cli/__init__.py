"""The command line: `rlx COMMAND`. Parses, calls the API, prints."""
