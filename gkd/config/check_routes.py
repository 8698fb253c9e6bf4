"""Check several teachers: their routes, the keys that refer to them, and what supports them."""

from __future__ import annotations

import math
import re

from gkd.config.check_values import check_value
from gkd.config.derived import Derived
from gkd.config.routes import Route
from gkd.config.schema import Config, DataConfig
from gkd.config.schema_teacher import MAX_NAME_LENGTH
from gkd.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_-]+")  # part of a metric's name


def check_routes(config: Config, derived: Derived) -> None:
    """Check that the routes are complete, and that nothing refers to one that is not there."""
    teacher, data = config.teacher, config.data
    if not teacher.routes:
        _check_unused(config)
        return
    for route in derived.routes:
        _check_route(route)
    if not data.teacher_key:
        fix = "name the column whose values are the names of the routes."
        raise ConfigError("data.teacher_key", "", "teacher.routes has entries, and no row names one.", fix)
    names = ", ".join(teacher.routes)
    if teacher.default_route and teacher.default_route not in teacher.routes:
        problem = "it is not one of teacher.routes."
        raise ConfigError("teacher.default_route", teacher.default_route, problem, f"use one of {names}.")
    _check_shares(config, names)
    if not derived.has_teacher_server:
        problem = f"with teacher.backend={teacher.backend} there is one teacher."
        raise ConfigError("teacher.routes", names, problem, "remove them, or set teacher.backend=zmq.")
    if derived.loss.has_reference and derived.loss.has_temperatures:
        problem = "the reference computes at teacher.temperature, and a route has another one."
        name, off = ("reference_kl_weight", 0) if derived.loss.reference_weight else ("teacher_reward_scale", 1)
        value = getattr(config.distill, name)
        raise ConfigError(f"distill.{name}", value, problem, f"use {off}, or one temperature.")


def _check_unused(config: Config) -> None:
    """Raise ConfigError if a key has no effect without routes."""
    normalize = config.distill.normalize
    if normalize == "domain":
        problem, fix = "without teacher.routes there is one domain.", "use token, or set teacher.routes."
        raise ConfigError("distill.normalize", normalize, problem, fix)
    for key, value, default in (
        ("data.teacher_key", config.data.teacher_key, DataConfig().teacher_key),
        ("data.domain_shares", config.data.domain_shares, DataConfig().domain_shares),
        ("teacher.default_route", config.teacher.default_route, ""),
    ):
        if value != default:
            raise ConfigError(key, value, "teacher.routes is empty.", "remove it, or set teacher.routes.")


def _check_route(route: Route) -> None:
    label, teacher = route.label, route.teacher
    if not _NAME.fullmatch(route.name):
        problem = "a name has letters, digits, _ and - only, because metrics contain it."
        raise ConfigError("teacher.routes", route.name, problem, "rename it.")
    if not (math.isfinite(route.weight) and route.weight > 0):
        fix = "use a positive number, or remove the route and its rows."
        raise ConfigError(f"{label}.weight", route.weight, "must be a positive number.", fix)
    for name in ("server_port", "temperature"):
        try:
            check_value(f"teacher.{name}", getattr(teacher, name))
        except ConfigError as error:
            raise ConfigError(route.key(name), error.value, error.problem, error.fix) from error
    if len(teacher.name) > MAX_NAME_LENGTH:
        fix = f"use one of the server's names, of at most {MAX_NAME_LENGTH} characters."
        raise ConfigError(route.key("name"), teacher.name, "is too long.", fix)


def _check_shares(config: Config, names: str) -> None:
    shares, size = config.data.domain_shares, config.trainer.global_batch_size
    if not shares:
        return
    if shares.keys() != config.teacher.routes.keys() or not all(0 < share < math.inf for share in shares.values()):
        fix = f"give each of {names} a number > 0."
        raise ConfigError("data.domain_shares", shares, "is not a positive share of each of teacher.routes.", fix)
    if max(shares.values()) * size < (len(shares) - 1) * sum(shares.values()):
        problem = f"{len(shares)} routes cannot alternate in batches of {size} prompts."
        raise ConfigError("data.domain_shares", shares, problem, "increase trainer.global_batch_size.")
