"""Shared by the tests of the integrations: small text models with random weights."""

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the models of a module are kept."""
    return tmp_path_factory.mktemp("tiny") / "bert"


@pytest.fixture
def model(folder):
    import texts

    return texts.bi_encoder(folder, dropout=0.0)


@pytest.fixture
def reranker(folder):
    import texts

    return texts.cross_encoder(folder.with_name("reranker"))
