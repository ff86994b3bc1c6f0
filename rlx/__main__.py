"""`python -m rlx`: the same as `rlx`."""

try:
    from rlx.cli.main import main
except ModuleNotFoundError as error:
    if error.name not in ("click", "rich"):
        raise
    from rlx.install import install_package

    raise SystemExit(f"the command line needs the package {error.name}: {install_package(error.name)}") from None

main()
