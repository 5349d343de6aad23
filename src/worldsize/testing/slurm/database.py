"""Room: accounting: a database of the cluster's own, and slurmdbd before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worldsize.errors import LaunchError
from worldsize.launch import shell
from worldsize.runtime.network import reachable
from worldsize.testing.slurm.config import CONTROLLER, database_sql

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from worldsize.testing.slurm.config import Site
    from worldsize.testing.slurm.places import Places

_TOLD = (("cluster", "lab"), ("account", "lab", "Description=lab", "Organization=lab"))


class Database:
    """MariaDB and slurmdbd on the controller's machine.

    Args:
        site: where they listen.
        places: where they run.
        env: of commands.
        wait: waits for a fact about the daemon of that name, and raises where it does not become true.
    """

    def __init__(
        self, site: Site, places: Places, env: Mapping[str, str], wait: Callable[[str, Callable[[], bool]], None]
    ) -> None:
        self._site, self._places, self._env, self._wait = site, places, env, wait
        self._data = site.folder / "mysql"

    def start(self) -> None:
        """Start both, and make known what slurmctld must find at its own start."""
        if not self._data.exists():
            self._create()
        self._places.daemon(CONTROLLER, "mariadbd", self._server())
        self._wait(f"{CONTROLLER}.mariadbd", lambda: self._sql(database_sql()))
        self._places.daemon(CONTROLLER, "slurmdbd", ("slurmdbd", "-D"))
        port = self._site.accounting_port
        assert port is not None
        self._wait(f"{CONTROLLER}.slurmdbd", lambda: reachable(self._site.controller.address, port, 0.1))
        for words in (*_TOLD, ("user", self._site.user, "Account=lab", "AdminLevel=Administrator")):
            self._call("sacctmgr", "-i", "add", *words)

    def _create(self) -> None:
        self._data.mkdir(mode=0o700)
        done = self._call(
            "mariadb-install-db", "--no-defaults", f"--user={self._site.user}", f"--datadir={self._data}",
            "--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve",
        )  # fmt: skip
        if done.code:
            raise LaunchError("the accounting database cannot be made", found=(done.err or done.out).strip()[-500:])

    def _server(self) -> tuple[str, ...]:
        """Small, and careless about power cuts of this machine itself: its data goes with the cluster."""
        return (
            "mariadbd", "--no-defaults", f"--user={self._site.user}", f"--datadir={self._data}",
            f"--socket={self._site.database_socket}", "--bind-address=127.0.0.1", f"--port={self._site.database_port}",
            f"--pid-file={self._site.folder}/run/mariadbd.pid", "--innodb-buffer-pool-size=64M",
            "--innodb-log-file-size=16M", "--innodb-lock-wait-timeout=900", "--innodb-flush-log-at-trx-commit=0",
            "--sync-binlog=0", "--skip-name-resolve",
        )  # fmt: skip

    def _sql(self, text: str) -> bool:
        argv = ("mariadb", "--no-defaults", f"--socket={self._site.database_socket}", "--user=root")
        return shell.call(argv, self._env, text=text).code == 0

    def _call(self, *argv: str) -> shell.Done:
        return shell.call(argv, self._env, timeout=60.0)
