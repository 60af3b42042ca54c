"""What an engine says at each position of a text, whole: for eval/engine_kld.py, in the engine's own Python."""

import numpy as np


class Predictions:
    """The reference's are written to a file; others are set against those in it, in the same order."""

    def __init__(self, path, reference):
        self.file, self.reference = open(path, "wb" if reference else "rb"), reference
        self.kld, self.same = [], 0

    def take(self, found):
        """Log probabilities in float32 [positions, vocabulary]."""
        if self.reference:
            self.file.write(found.tobytes())
            self.file.flush()
            return
        exact = np.fromfile(self.file, np.float32, found.size).reshape(found.shape)
        p, q = exact.astype(np.float64), found.astype(np.float64)
        self.kld += (np.exp(p) * (p - q)).sum(-1).tolist()
        self.same += int((exact.argmax(-1) == found.argmax(-1)).sum())

    def told(self):
        """Of all positions so far: divergences, and how often the likeliest token is the same."""
        return {"kld": self.kld, "same": self.same}


def windows(tokenizer, text, count, tokens):
    """The first tokens of a text, `tokens` in each."""
    found = tokenizer(text[: count * tokens * 16], add_special_tokens=False)["input_ids"]
    return [found[at * tokens : (at + 1) * tokens] for at in range(count)]
