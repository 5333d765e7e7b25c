"""The byte alphabet of GPT-2 style vocabularies: each byte is spelled as one printable character.

Printable Latin-1 bytes spell themselves; the other 68 take the code points from 256 on, in order of
the byte (Radford et al. 2019, the released encoder).
"""

from __future__ import annotations

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF_CHAR = {chr(byte): byte for byte in _PRINTABLE}
BYTE_OF_CHAR |= {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}


def piece_bytes(piece: str) -> bytes:
    """Bytes of a vocabulary piece. One with characters outside the alphabet stands for itself."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in piece])
    except KeyError:
        return piece.encode("utf-8", "replace")
