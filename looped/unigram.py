"""The entropy of token frequencies, which any model must beat."""

import numpy as np


def count_targets(folder, entry, vocab_size):
    """How often each id is a target in the rows of a shard: (V,)."""
    rows = np.load(folder / entry["file"], mmap_mode="r")
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(rows), 4096):
        counts += np.bincount(rows[start : start + 4096, 1:].ravel(), minlength=vocab_size)
    return counts


def unigram_entropy(folder, entries, vocab_size):
    """Nats per validation target under the frequencies of the training tokens (+1 smoothed; 100M
    suffice): the line that any model must beat.
    """
    targets = count_targets(folder, entries[0], vocab_size)
    law = np.ones(vocab_size)
    for entry in entries[1:]:
        if entry["rows"] and law.sum() < 100e6:
            law += count_targets(folder, entry, vocab_size)
    return float(-(targets * np.log(law / law.sum())).sum() / targets.sum())
