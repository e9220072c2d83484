"""What computes the losses: one :class:`~rankgrad.engine.request.Request` in, one ``Answer`` out.

A request holds the lists, the form of the loss and the reach of relevant items; an answer the loss of every
list and its gradient up to a factor. Every engine (:mod:`~rankgrad.engine.reference`, :mod:`~rankgrad.engine.cpu`,
:mod:`~rankgrad.engine.cuda`) has the same two functions:

``evaluate``
    request -> answer.
``standings``
    request -> where the relevant items stand; what metrics are made of.

Gradients are made of integers (counts and rank changes, or sums of slopes in units of a power of two), so engines
can be held equal to the bit. :mod:`~rankgrad.engine.ops` makes ops of torch of them, with autograd, vmap and
torch.compile.
"""
