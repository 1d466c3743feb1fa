"""Danger: a server that lets strangers in: listening publicly without a lock, or a lock that any key opens."""

from __future__ import annotations

from pathlib import Path

import pyarrow.flight as flight
import pytest

from monolith.errors import AuthenticationError, ConfigError, StorageError, UnavailableError
from monolith.ps import ClientConfig, ParameterServer, ServerConfig, ServerStore
from monolith.testing import sgd_table_config
from monolith.transport.link import Transport
from tls import TOKEN


def test_by_default_it_listens_on_loopback_only() -> None:
    with ParameterServer() as server:
        assert server.address == f"127.0.0.1:{server.port}"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", ""])
@pytest.mark.parametrize("locks", ["none", "token", "tls"])
def test_a_public_address_without_both_locks_is_refused(host: str, locks: str, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    with pytest.raises(ConfigError, match=r"can be reached from other machines|ServerConfig\.host"):
        ParameterServer(
            ServerConfig(
                host=host,
                token=TOKEN if locks == "token" else None,
                tls_cert=cert if locks == "tls" else None,
                tls_key=key if locks == "tls" else None,
            )
        )


def test_a_public_address_with_both_locks_serves(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    config = ServerConfig(host="0.0.0.0", token=TOKEN, tls_cert=cert, tls_key=key)
    client = ClientConfig(token=TOKEN, tls_root_certs=cert)
    with ParameterServer(config) as server, ServerStore([f"127.0.0.1:{server.port}"], config=client) as store:
        assert store.health()[0]["tables"] == 0


@pytest.mark.parametrize("transport", ["socket", "flight"])
@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", TOKEN[:-1], TOKEN.upper()])
def test_every_stream_without_the_token_is_turned_away_and_logged(
    token: str | None, transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    with ParameterServer(ServerConfig(token=TOKEN, transport=transport)) as server:
        with pytest.raises(
            AuthenticationError, match=r"asks for a token.* --token-file, or the token in MONOLITH_PS_TOKEN"
        ):
            ServerStore(
                [server.address],
                [sgd_table_config(1, name="t")],
                config=ClientConfig(token=token, transport=transport),
            )
        assert "refused a client: its token is missing or wrong" in caplog.text
        with ServerStore([server.address], config=ClientConfig(token=TOKEN, transport=transport)) as store:
            assert store.stats() == {}


def test_servers_with_both_locks_give_buckets_to_each_other(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    config = ServerConfig(host="localhost", token=TOKEN, tls_cert=cert, tls_key=key)
    client = ClientConfig(token=TOKEN, tls_root_certs=cert)
    with (
        ParameterServer(config) as one,
        ParameterServer(config) as two,
        ServerStore([one.address], config=client) as store,
    ):
        assert set(store.rebalance([one.address, two.address]).addresses) == {one.address, two.address}


def test_sockets_and_certificates_are_refused_together_since_sockets_do_not_encrypt(
    certificate: tuple[Path, Path],
) -> None:
    cert, key = certificate
    with pytest.raises(ConfigError, match="cannot encrypt"):
        ParameterServer(ServerConfig(tls_cert=cert, tls_key=key, transport="socket"))
    with pytest.raises(ConfigError, match="cannot encrypt"):
        ServerStore(["127.0.0.1:1"], config=ClientConfig(tls_root_certs=cert, transport="socket"))


def test_no_other_flight_call_is_open_either() -> None:
    with ParameterServer(ServerConfig(token=TOKEN, transport="flight")) as server:
        client = flight.connect(f"grpc://{server.address}")
        for call in (lambda: list(client.list_flights()), lambda: list(client.list_actions())):
            with pytest.raises(flight.FlightUnauthenticatedError):
                call()
        client.close()


def test_a_client_that_does_not_trust_the_certificate_does_not_talk(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    cert, key = certificate
    with ParameterServer(ServerConfig(host="localhost", token=TOKEN, tls_cert=cert, tls_key=key)) as server:
        with pytest.raises(UnavailableError):
            ServerStore([server.address], config=ClientConfig(token=TOKEN, timeout=1.0))
        other = tmp_path / "other.pem"
        other.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
        with pytest.raises(UnavailableError):
            ServerStore([server.address], config=ClientConfig(token=TOKEN, tls_root_certs=other, timeout=1.0))
        with ServerStore([server.address], config=ClientConfig(token=TOKEN, tls_root_certs=cert)) as store:
            assert store.health()[0]["dense"] == 0


@pytest.mark.parametrize("token", ["short", "fifteen-letters", "with a space in it", "ümlaute-sind-lang-genug"])
def test_a_weak_token_is_refused_and_never_shown(token: str) -> None:
    config = ServerConfig(token=token)
    with pytest.raises(ConfigError, match="at least 16 ASCII characters") as caught:
        ParameterServer(config)
    assert token not in str(caught.value) + repr(config) + repr(ClientConfig(token=token))


def test_files_that_are_missing_or_not_pem_are_named(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, _ = certificate
    with pytest.raises(ConfigError, match="give both tls_cert and tls_key"):
        ParameterServer(ServerConfig(tls_cert=cert))
    with pytest.raises(StorageError, match="tls_key: cannot read"):
        ParameterServer(ServerConfig(tls_cert=cert, tls_key=tmp_path / "absent"))
    (tmp_path / "empty").touch(mode=0o600)
    with pytest.raises(ConfigError, match="tls_key: expected a PEM file"):
        ParameterServer(ServerConfig(tls_cert=cert, tls_key=tmp_path / "empty"))
    with pytest.raises(StorageError, match="tls_root_certs: cannot read"):
        ServerStore(["127.0.0.1:1"], config=ClientConfig(tls_root_certs=tmp_path / "absent"))


def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    with (
        ParameterServer() as server,
        pytest.raises(UnavailableError, match=f"cannot listen on 127.0.0.1:{server.port}"),
    ):
        ParameterServer(ServerConfig(port=server.port))
