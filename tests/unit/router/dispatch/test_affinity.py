"""What is remembered of a `prompt_cache_key`."""

from baton.domain.ids import Incarnation
from baton.services.router.dispatch.cache_index.affinity import KeyAffinity

FIRST, SECOND = (Incarnation(1), Incarnation(11)), (Incarnation(2), Incarnation(12))


def test_the_last_workers_of_a_key_are_found():
    affinity = KeyAffinity()
    assert affinity.find("a") is None
    affinity.add("a", FIRST)
    affinity.add("b", SECOND)
    assert (affinity.find("a"), affinity.find("b")) == (FIRST, SECOND)
    affinity.add("a", SECOND)
    assert affinity.find("a") == SECOND


def test_no_key_is_not_one():
    affinity = KeyAffinity()
    affinity.add("", FIRST)
    assert affinity.find("") is None
    assert len(affinity) == 0


def test_ever_new_keys_push_out_the_least_recently_used():
    affinity = KeyAffinity(max_keys=2)
    for key in ("a", "b", "a", "c"):
        affinity.add(key, FIRST)
    assert len(affinity) == 2
    assert [affinity.find(key) for key in "abc"] == [FIRST, None, FIRST]
