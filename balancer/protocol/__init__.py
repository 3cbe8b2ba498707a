"""Three stages between the ranks: gather lengths, plan, shuffle samples (paper, Algorithm 1).

protocol.py is the order of it; header.py and selection.py say what stage I gathers, shuffle.py plans and exchanges,
payload.py packs, schema.py makes sure that ranks mean the same columns. gather.py and quiet.py spare a busy trainer
what the thread beside it can do without.
"""
