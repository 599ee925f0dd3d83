"""What a model is: architectures, the operations of a step, and the ledger of what a step computes and moves.

Knows shapes, formats and bytes; never branches on a memory tier, runs nothing.
"""
