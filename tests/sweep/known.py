"""Types of transformers that the sweep can't build small, and those that lowkv refuses by name."""

NOT_BUILT = {}
REFUSED = {}
