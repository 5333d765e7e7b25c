"""From requests to tokens: the loop, the compiled step, and what feeds it.

Read in this order: core.py (the loop: plan, dispatch, absorb), step.py (what one compiled step
computes), pack.py (a plan as arrays of one bucket), runner.py (the table of compiled programs),
output.py (tokens become text), async_engine.py (one engine thread behind an asyncio door).
"""
