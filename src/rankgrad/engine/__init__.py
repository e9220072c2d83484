"""The hard work behind the losses: scores, relevance, mask in; integers (counts and rank changes) out.

Every engine offers the same two steps, on ``[calls, lists, n]`` tensors:

``relevant_ranks``
    (scores, relevance, mask, margin) -> for the relevant items of each list, best first, how many
    irrelevant items stand at or above them.
``rank_changes``
    (the same, and a score step for each relevant item) -> how far every item's rank moves.

Between the two, a loss turns counts into numbers and steps in plain torch (:mod:`rankgrad.engine.forms`).
Engines compute integers only, so they can be held equal to the bit.
"""
