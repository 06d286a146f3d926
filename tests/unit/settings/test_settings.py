"""Settings: precedence, refusals and derived values."""

import subprocess
import sys

import pytest
from pydantic import Field, ValidationError

from baton.domain.timing.step_time import StepTimeModel
from baton.services.decode.settings import DecodeSettings
from baton.services.prefill.policy import PolicySettings, PrefillPolicy
from baton.services.prefill.settings import PrefillSettings
from baton.services.router.settings import RouterSettings
from baton.settings.base import Settings, SettingsError, known_variables, refuse_unknown_variables
from baton.settings.choices import Dtype
from baton.settings.groups import WorkerSettings, parse_cores

MODELS = (RouterSettings, PrefillSettings, DecodeSettings)
VALIDATORS_BUILT = """
import baton.services.cli.main
from baton.services.cli.settings import COMMANDS
built = lambda: sorted(name for name, model in COMMANDS.items() if model.__pydantic_complete__)
print(len(COMMANDS), *built())
COMMANDS["serve router"]()
print(*built())
"""


class Described(Settings):
    """Text of the class."""

    plain: int = 1
    """Of a field
    in two lines."""
    explicit: int = Field(1, description="as it says")
    """Not this."""
    undescribed: int = 1

    class Inner:
        plain: int = 2
        """Of another class."""


class Inheriting(Described):
    plain: int = 3
    other: int = 1
    """Of a second one."""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in known_variables(MODELS):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("model", MODELS)
def test_every_field_is_documented_and_there_are_at_most_76(model):
    assert all(field.description for field in model.model_fields.values())
    assert len(model.model_fields) <= 76


def test_fields_have_the_texts_that_follow_them():
    texts = {name: field.description for name, field in Described.model_fields.items()}
    assert texts == {"plain": "Of a field\nin two lines.", "explicit": "as it says", "undescribed": None}


def test_inherited_fields_keep_their_texts_unless_they_are_replaced():
    texts = {name: field.description for name, field in Inheriting.model_fields.items()}
    assert texts == {"plain": None, "explicit": "as it says", "undescribed": None, "other": "Of a second one."}


def test_the_command_builds_the_validator_that_it_uses():
    """It knows the settings of all services, for flags and names of variables."""
    run = subprocess.run([sys.executable, "-c", VALIDATORS_BUILT], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    before, after = run.stdout.splitlines()
    assert before.split()[1:] == []
    assert int(before.split()[0]) > 1
    assert after == "serve router"


def test_explicit_values_beat_variables_which_beat_defaults(monkeypatch):
    assert PrefillSettings().page_size == 16
    monkeypatch.setenv("BATON_PAGE_SIZE", "32")
    assert PrefillSettings().page_size == 32
    assert PrefillSettings(page_size=64).page_size == 64


def test_an_empty_variable_counts_as_unset(monkeypatch):
    monkeypatch.setenv("BATON_NUM_PAGES", "")
    assert DecodeSettings().num_pages is None


def test_enums_read_from_the_environment_compare_as_strings(monkeypatch):
    monkeypatch.setenv("BATON_DTYPE", "float32")
    dtype = DecodeSettings().dtype
    assert (dtype, type(dtype)) == ("float32", Dtype)


def test_settings_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        setattr(RouterSettings(), "port", 1)  # noqa: B010  (mypy sees what this test is about)


def test_an_unknown_flag_is_refused():
    with pytest.raises(ValidationError, match="max_rowz"):
        DecodeSettings.model_validate({"max_rowz": 3})


@pytest.mark.parametrize(
    ("model", "values", "words"),
    [
        (RouterSettings, {"port": 70000}, "65535"),
        (RouterSettings, {"redis_url": "http://x"}, "redis://"),
        (RouterSettings, {"worker_ttl_s": 0.6}, "twice"),
        (PrefillSettings, {"host": "0.0.0.0", "redis_url": "unix:///x"}, "advertise_address"),
        (PrefillSettings, {"token_budget": 8}, "page_size"),
        (PrefillSettings, {"pin_fraction": 0.0}, "greater than 0"),
        (PrefillSettings, {"cpu_affinity": "a-b"}, "0-3,8"),
        (DecodeSettings, {"dtype": "int8"}, "float32"),
        (DecodeSettings, {"quantization": "int4"}, "int8"),
        (DecodeSettings, {"quantization": "int8", "decoder": "stock"}, "lean decoder"),
        (PrefillSettings, {"quantization": "int8", "kernels": False}, "native kernels"),
    ],
)
def test_unusable_values_are_refused_with_a_reason(model, values, words):
    with pytest.raises(ValidationError, match=words):
        model(**values)


def test_an_unknown_variable_is_refused_with_the_nearest_name():
    with pytest.raises(SettingsError, match=r"BATON_PAGESIZE.*BATON_PAGE_SIZE"):
        refuse_unknown_variables(MODELS, {"BATON_PAGESIZE": "16"})


def test_variables_of_other_services_are_accepted():
    refuse_unknown_variables(MODELS, {"BATON_MAX_ROWS": "2", "BATON_MAX_ATTEMPTS": "1", "PATH": "/bin"})


def test_unknown_variables_are_read_from_the_process_environment(monkeypatch):
    monkeypatch.setenv("BATON_MODLE", "x")
    with pytest.raises(SettingsError, match="BATON_MODEL"):
        refuse_unknown_variables([RouterSettings])


def test_pool_pages_come_from_the_number_or_from_the_memory():
    assert PrefillSettings(num_pages=7).pool_pages(page_bytes=1 << 20) == 7
    assert PrefillSettings(kv_memory_mib=3).pool_pages(page_bytes=1 << 20) == 3
    with pytest.raises(SettingsError, match="kv-memory-mib"):
        PrefillSettings(kv_memory_mib=1).pool_pages(page_bytes=(1 << 20) + 1)


def test_the_advertised_address_names_the_bound_port():
    assert PrefillSettings(port=0).advertised(4711) == "127.0.0.1:4711"
    elsewhere = PrefillSettings(host="0.0.0.0", advertise_address="prefill:50051")
    assert elsewhere.advertised(50051) == "prefill:50051"


def test_core_lists_are_parsed():
    assert parse_cores("0-2, 5") == {0, 1, 2, 5}
    assert DecodeSettings(cpu_affinity="1").cores == frozenset({1})
    assert DecodeSettings().cores is None
    for text in ("", "3-1", "1-", "-1", "1,,2"):
        with pytest.raises(ValueError, match=r"core|given"):
            parse_cores(text)


def test_the_public_name_of_a_directory_is_its_last_part(tmp_path):
    assert RouterSettings().public_model_name == "bundled"
    assert RouterSettings(model=str(tmp_path)).public_model_name == tmp_path.name
    assert RouterSettings(model="org/name").public_model_name == "org/name"
    assert RouterSettings(served_model_name="mine").public_model_name == "mine"
    assert RouterSettings(served_model_name="mine, yours,,mine").model_names == ("mine", "yours")


def test_an_empty_worker_id_is_refused():
    with pytest.raises(ValidationError):
        WorkerSettings()


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:5557", "tcp://localhost:5557", "tcp://[::1]:5557", "ipc:///tmp/kv"]
)
def test_kv_events_may_be_published_on_this_machine(endpoint: str):
    assert DecodeSettings(kv_events_endpoint=endpoint).kv_events_endpoint == endpoint


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://10.0.0.7:5557", "tcp://[::]:5557"])
def test_kv_events_leave_the_machine_only_with_a_second_flag(endpoint: str):
    with pytest.raises(ValidationError, match="kv_events_public"):
        DecodeSettings(kv_events_endpoint=endpoint)
    with pytest.raises(ValidationError, match="kv_events_public"):
        DecodeSettings(kv_events_endpoint="tcp://127.0.0.1:5557", kv_events_replay_endpoint=endpoint)
    DecodeSettings(kv_events_endpoint=endpoint, kv_events_public=True)


def test_a_replay_needs_events():
    with pytest.raises(ValidationError, match="kv_events_endpoint"):
        DecodeSettings(kv_events_replay_endpoint="tcp://127.0.0.1:5558")


def test_every_setting_of_the_order_of_prompts_arrives():
    given = {"prefill_policy": "edf", "oldest_prompt_share": 0.5, "max_overtakes": 3, "ttft_objective_s": 2.0}
    settings = PrefillSettings.model_validate({**given, "prefix_sharing": False, "priority_scheduling": True})
    order = PolicySettings(PrefillPolicy.EDF, 0.5, 3, 2.0, prefix_sharing=False, by_priority=True)
    assert settings.order() == order


@pytest.mark.parametrize(("chunking", "is_used"), [("fixed", False), ("equal", True), ("itl", False)])
def test_prefill_sizes_chunks_by_the_step_time_if_asked_to(chunking: str, is_used: bool):
    model = StepTimeModel()
    assert PrefillSettings.model_validate({"chunking": chunking}).equal_time(model) is (model if is_used else None)
