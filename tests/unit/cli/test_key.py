"""`baton key`: a key and its line for the keys file; and the key of the smoke request of `baton up`."""

from __future__ import annotations

import pytest

from baton.services.cli.key import OWN_TENANT, own_keys
from baton.services.cli.main import run
from baton.services.cli.plan import SharedFlags, make_plan
from baton.services.cli.settings import UpSettings
from baton.services.router.edge.api_keys import ApiKeys, make_entry, new_key
from baton.settings.base import SettingsError


def test_the_line_lets_the_key_in(tmp_path, capsys):
    lines, keys = [], []
    for tenant in ("red", "blue", "red"):
        assert run(["key", tenant]) == 0
        printed = capsys.readouterr()
        lines.append(printed.out)
        keys.append(printed.err.split()[-1])
        assert keys[-1] not in printed.out
    file = tmp_path / "keys"
    file.write_text("".join(lines))
    assert [ApiKeys.read(file).tenant_of(key) for key in keys] == ["red", "blue", "red"]


@pytest.mark.parametrize("tenant", ["", "a b", "-x", "a" * 65, "a#b", "a\nb", "é"])
def test_a_name_that_the_file_cannot_hold_is_refused(tenant: str, capsys):
    assert run(["key", "--", tenant]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "sk-baton" not in printed.err


def test_up_has_its_own_key_while_it_runs(tmp_path):
    theirs, file = new_key(), tmp_path / "keys"
    file.write_text(make_entry("red", theirs).line())
    with own_keys(file) as keys:
        assert keys is not None
        ring = ApiKeys.read(keys.file)
        assert (ring.tenant_of(theirs), ring.tenant_of(keys.key)) == ("red", OWN_TENANT)
        assert keys.file.stat().st_mode & 0o077 == 0
        plan = make_plan(UpSettings(port=0), SharedFlags("redis://x", tmp_path), [0], keys)
        assert f"--api-keys-file={keys.file}" in plan.commands[-1].arguments
        assert plan.own_key == keys.key
        assert keys.key not in f"{plan} {keys}"
    assert not keys.file.exists()
    assert file.read_text() == make_entry("red", theirs).line()


def test_up_without_a_keys_file_makes_no_key(tmp_path):
    with own_keys(None) as keys:
        plan = make_plan(UpSettings(port=0), SharedFlags("redis://x", tmp_path), [0], keys)
        assert (keys, plan.own_key) == (None, None)
        assert "api-keys-file" not in " ".join(plan.commands[-1].arguments)


def test_up_refuses_a_keys_file_that_the_router_refuses(tmp_path):
    (tmp_path / "keys").write_text("nonsense")
    with pytest.raises(SettingsError, match="line 1"), own_keys(tmp_path / "keys"):
        pass
