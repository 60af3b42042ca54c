import pytest
from families import build
from saved import filled


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request):
    return build(request.param)[0]


@pytest.fixture
def saved(model, tmp_path):
    cache = filled(model)
    cache.save(tmp_path / "prefix")
    return cache, tmp_path / "prefix"
