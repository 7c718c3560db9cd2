"""Which KV block holds which prefix: a map from a chained digest to a block.

A block's digest covers its own tokens and, through its parent's digest, every token before it:

    digest[0] = blake2b(ROOT      + tokens[0:256])
    digest[i] = blake2b(digest[i-1] + tokens[256 * i : 256 * (i + 1)])

KV at a position depends on all tokens up to it, so only the whole chain may be trusted. The
256-bit cryptographic digest stands for the content: nobody can find two prefixes that share one.
It has no per-process salt, so equal prompts have equal digests in every process.
"""

from __future__ import annotations

from hashlib import blake2b

from nanorunner.workers.messages import Int32

DIGEST_BYTES = 32
ROOT = b"nanorunner prefix of int32 ids".ljust(DIGEST_BYTES, b".")


def extend_digests(
    digests: list[bytes], token_ids: Int32, num_blocks: int, block_size: int
) -> None:
    """Append the missing digests, in place, until `digests` covers num_blocks full blocks."""
    for index in range(len(digests), num_blocks):
        parent = digests[-1] if digests else ROOT
        tokens = token_ids[index * block_size : (index + 1) * block_size]
        content = parent + tokens.astype("<i4", copy=False).tobytes()
        digests.append(blake2b(content, digest_size=DIGEST_BYTES).digest())


class PrefixCache:
    """Digest to block and back; knows nothing of who uses a block."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: int) -> bool:
        return block in self._digest_of

    def match(self, digests: list[bytes], most: int) -> list[int]:
        """Return the blocks of the longest published prefix, at most `most` blocks."""
        blocks: list[int] = []
        for digest in digests[:most]:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, block: int, digest: bytes) -> bool:
        """Map the digest to the block and return True; False if another block holds it already.

        The first mapping stays: requests may have been matched to it this very step.
        """
        if digest in self._block_of or block in self._digest_of:
            return False
        self._block_of[digest] = block
        self._digest_of[block] = digest
        return True

    def forget(self, block: int) -> None:
        """Unmap the block, before its content changes; nothing happens if it is not mapped."""
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
