"""HyperPod's elastic agent on a torch newer than it declares.

hyperpod-elastic-agent 1.1.3 declares torch <2.12, because torch 2.12 took an option name that the agent adds
itself, `--shutdown-timeout`: its own `hyperpodrun` dies while building its parser. Here the agent's option takes
the place of torch's. With that the agent's published unit tests pass on torch 2.13; no operator has driven it.
"""

import argparse
import sys

from torch.distributed import run as torchrun

_torch_parser = torchrun.get_args_parser


def forgiving_parser() -> argparse.ArgumentParser:
    """Torch's parser of `torchrun`, in which an option added later replaces one of the same name."""
    parser = _torch_parser()
    for container in (parser, *parser._action_groups):
        container.conflict_handler = "resolve"
    return parser


def main() -> None:
    """`hyperpodrun`."""
    torchrun.get_args_parser = forgiving_parser
    from hyperpod_elastic_agent.run import main as agent

    sys.exit(agent())


if __name__ == "__main__":
    main()
