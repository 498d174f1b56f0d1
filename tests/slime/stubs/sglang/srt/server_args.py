from argparse import ArgumentParser


class ServerArgs:
    @staticmethod
    def add_cli_args(parser: ArgumentParser) -> None:
        for flag in ("--dp-size", "--pp-size", "--ep-size", "--moe-dp-size"):
            parser.add_argument(flag, type=int, default=1)
        parser.add_argument("--enable-dp-attention", action="store_true")
