"""Attention and matmul operations behind one contract each, with a backend per device.

An op is a folder: api.py (the contract and the only thing others import), reference.py (plain jnp,
read it first), tpu.py / gpu.py (Pallas), cpu.cc (native), shapes.py (what tests and benches run).
"""
