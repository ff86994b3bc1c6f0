"""What `--json` prints, as types. docs/json.md is made of these files, and tests compare every command with them.

Sizes are bytes and times are seconds, unless a comment says something else. Every object that a command prints has
`schema`, the version of these types. A version may get more fields and objects; where one goes, or means something
else, that is another version.
"""

__all__ = ["VERSION"]

VERSION = 1
