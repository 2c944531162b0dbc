"""Work done in parallel: by other processes, or by a thread that is one item ahead."""

import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from looped.console import fail


def watch_parent():
    """In a worker: its parent's death ends it too, however sudden."""

    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def worker_pool(n):
    """n processes that end with this one, or one thread; says so if a process is killed."""
    if n == 1:
        pool = ThreadPoolExecutor(1)
    else:
        # the tracker of their semaphores inherits this; it would warn of them after Ctrl-C
        sys.warnoptions.append("ignore:resource_tracker")
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(n, spawn, watch_parent)
        # started here, the workers inherit the block, so that Ctrl-C reaches this process alone
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        pool.map(int, range(n))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        yield pool
    except OSError:  # a full disk: Python's own end, while workers run, can warn of a closed pipe
        pool.shutdown(cancel_futures=True)
        raise
    except BrokenProcessPool:
        fail(f"a worker process was killed, perhaps for lack of memory; try --workers {n // 2}")
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
