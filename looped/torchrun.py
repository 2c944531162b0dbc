"""torchrun whose failed ranks speak for themselves: `python -m looped.torchrun …` as torchrun."""

import os
import sys

os.environ.setdefault("LOGLEVEL", "CRITICAL")

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main():
    try:
        run.main()
    except (
        ChildFailedError
    ) as e:  # its traceback is of torchrun, 36 lines; the rank has printed its error
        _, first = e.get_first_failure()
        sys.exit(first.exitcode)


if __name__ == "__main__":
    main()
