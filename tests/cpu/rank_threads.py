"""Ranks as threads of one process, which meet at a store of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def on_threads(
    tp: int, body: Callable[[TCPStore, int], object], limit_s: float = 100.0
) -> list[object]:
    """Run body(store, rank) on tp threads, each for limit_s at most; return the results by rank."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results: list[object] = [None] * tp

    def run(rank: int) -> None:
        # one client a thread: a store serves one waiting caller at a time
        mine = TCPStore("127.0.0.1", server.port, wait_for_workers=False)
        results[rank] = body(mine, rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(tp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=limit_s)
        assert not thread.is_alive()
    return results
