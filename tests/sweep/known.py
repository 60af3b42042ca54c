"""Types of transformers that the sweep can't build small, and those that lowkv refuses by name."""

NOT_BUILT = {}
REFUSED = {}
# Types that generate something else with their own cache than without one, and why.
STOCK_IS_WRONG = {"phi4_multimodal": "forgets the text but for a token where it changes to its long factors"}
