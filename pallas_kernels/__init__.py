"""Attention, matmul and rotary operations behind one contract each, with a backend per device.

An op is a folder: api.py (the contract and the only thing others import), reference.py (plain jnp,
read it first), and what else it has of tpu.py and gpu.py (Pallas), cpu.py and *.cc (native code),
shapes.py (what tests and benches run). tuned/ holds block sizes with the measurements behind them.
"""
