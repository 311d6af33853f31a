"""x"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass
