"""The file of tenants: what it may hold, and errors that name the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.services.router.admission.tenants import TenantLimits
from baton.services.router.admission.tenants_file import read_tenants
from baton.settings.base import SettingsError


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    return path


def test_a_tenant_has_the_defaults_of_the_file_where_it_says_nothing(tmp_path):
    text = """
        [default]
        max_priority = 0
        weight = 2
        [tenants.alice]
        weight = 4.5
        max_slots = 3
        requests_per_minute = 60
        tokens_per_minute = 1000.5
    """
    table = read_tenants(written(tmp_path, text))
    assert table.limits_of("alice") == TenantLimits(4.5, 3, 60, 1000.5, 0)
    assert table.limits_of("bob") == TenantLimits(weight=2, max_priority=0)
    assert table.limits_of("bob").clamp(3) == 0
    assert table.limits_of("bob").clamp(-9) == -3


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[tenants.alice]\nweigth = 1", "tenants.alice"),
        ("[tenants.alice]\nweight = 0", "weight"),
        ("[tenants.alice]\nweight = nan", "weight"),
        ("[tenants.alice]\nweight = true", "weight"),
        ("[tenants.alice]\nmax_slots = 1.5", "max_slots"),
        ("[default]\nmax_priority = 4", "max_priority"),
        ("[default]\ntokens_per_minute = '5'", "tokens_per_minute"),
        ("[alice]\nweight = 1", "alice"),
        ("default = 1", "default"),
        ("[default", "TOML"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, text, named):
    with pytest.raises(SettingsError) as error:
        read_tenants(written(tmp_path, text))
    assert named in str(error.value)
    assert "tenants.toml" in str(error.value)


def test_a_missing_file_is_an_error_with_a_hint(tmp_path):
    with pytest.raises(SettingsError, match="No such file"):
        read_tenants(tmp_path / "none.toml")
