"""The words that all rooms share: plain data that checks itself when it is made.

Messages (`messages`), what goes to an engine and comes back (`generation`), what a session takes in and yields
(`rollout`), a model request and its reply (`turn`), errors, options, clocks, strict JSON.

Consumes nothing and imports no other room. Invariant: a misaligned sample or result cannot exist, because lengths are
checked on construction.

Open first: `messages`, then `rollout` (`TrainingSample`).
"""
