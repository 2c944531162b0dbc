"""Work done in parallel: by other processes, or by a thread that is one item ahead."""

import ctypes
import multiprocessing
import os
import signal
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from looped.console import fail


def end_with_parent(parent):
    """In a worker: its parent's death ends it too, however sudden (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before that
        os._exit(1)


@contextmanager
def worker_pool(n):
    """n processes that end with this one, or one thread; handles a worker's death and Ctrl-C. n is
    what the program was given as --workers.
    """
    if n == 1:
        pool = ThreadPoolExecutor(1)
    else:
        # the tracker of their semaphores inherits this; it would warn of them after Ctrl-C
        sys.warnoptions.append("ignore:resource_tracker")
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(n, spawn, end_with_parent, (os.getpid(),))
    try:
        yield pool
    except BrokenProcessPool:
        fail(f"a worker process was killed, perhaps for lack of memory; try --workers {n // 2}")
    except KeyboardInterrupt:
        # Ended from here, workers print no traceback, nor Python a warning of leaked semaphores.
        for worker in multiprocessing.active_children():
            worker.kill()
        pool.shutdown(wait=n > 1)
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def one_ahead(function, items):
    """Yields function(item) of each, computed in a thread while the one before is in use."""
    pool = ThreadPoolExecutor(1)  # not in `with`, where Ctrl-C would wait for it
    coming = None
    for item in items:
        ready = coming
        coming = pool.submit(function, item)
        if ready:
            yield ready.result()
    if coming:
        yield coming.result()
