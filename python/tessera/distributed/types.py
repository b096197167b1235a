"""Types that the distributed modules share."""

from tessera.comm import Awaitable, LazyAwaitable, LazyNoWait, NoWait

__all__ = ["Awaitable", "LazyAwaitable", "LazyNoWait", "NoWait"]
