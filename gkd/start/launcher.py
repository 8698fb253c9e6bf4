"""Start the pools and connect the roles; take everything down again whatever happens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from gkd.actor import worker as actor_worker
from gkd.actor.frozen.pools import LocalScoring, NoTeacher, ReferencePool
from gkd.actor.pool import ActorPool
from gkd.actor.worker import ActorWorker
from gkd.cluster.calls import gather
from gkd.cluster.cluster import HELPER_CPUS, Cluster
from gkd.cluster.gpu_table import GpuMap, RankPlacement
from gkd.cluster.pool import Pool
from gkd.cluster.stacks import hang_report, rank_env
from gkd.cluster.startup import Startup
from gkd.config.schema import Config
from gkd.config.schema_teacher import ACTOR, NONE, ROLLOUT
from gkd.data.chunks import CHUNK_SIZE, chunk_size
from gkd.errors import GkdError, RankTimeout
from gkd.log import get_logger
from gkd.memory.usage import trim_heap
from gkd.preflight.run import Plan
from gkd.roles import NoReference, Roles
from gkd.rollout.driver.pool import RolloutPool
from gkd.rollout.driver.restart import EngineSlots, restarting
from gkd.rollout.driver.weight_sync import EngineSync, WeightSync
from gkd.rollout.engine import worker as rollout_worker
from gkd.rollout.engine.worker import RolloutWorker
from gkd.rollout.vllm.start import engine_folder, remove_files
from gkd.run.failure_policy import attempt
from gkd.run.folder import STACKS
from gkd.scoring.endpoint import ScoringEndpoint
from gkd.scoring.group_endpoint import GroupEndpoint
from gkd.scoring.judged import JUDGING, init_judging, with_judges, workers_per_endpoint
from gkd.scoring.pool import HEALTH, RECORDS, ScoringPool, teacher_heads
from gkd.scoring.teacher.window import throttle_warning, window_of_group
from gkd.spans import driver
from gkd.start.gpu_map import record_end, record_placement, record_restart
from gkd.start.pools import actor_env, cpu_threads, make_cluster, make_pools, worker_env

log = get_logger("launcher")


@contextmanager
def started_roles(plan: Plan, *, engines_sleep: bool = False) -> Iterator[Roles]:
    """Start both pools, load the models and join the weight-sync groups; stop everything on exit.

    Raises:
        ClusterError: resources are not available, a rank failed, or two ranks share a GPU by mistake.
        RankTimeout: ranks were not ready within trainer.init_timeout_s, or did not complete a later call in time. Names
            the ranks that hang; the run folder has all stacks.
    """
    config = plan.config
    t = plan.config.trainer
    with driver.doing("joining Ray" if config.cluster.ray_address else "starting Ray"):
        cluster = make_cluster(config, on_cpu=plan.device == "cpu")
    with ExitStack() as ending:
        ending.callback(_stop, cluster)
        with driver.doing("reserving the pools"):
            slots = make_pools(cluster, config, t.init_timeout_s)
        startup = Startup(t.init_timeout_s)
        try:
            with driver.doing("start-up"), startup:
                roles, restarts = _start(config, plan, startup, slots[ACTOR], slots[ROLLOUT], ending, engines_sleep)
            log.info("all ranks are ready")
            stopped = "interrupted"
            try:
                with restarts:
                    yield replace(roles, diagnose_hang=lambda error: _diagnosed(error, startup, cluster.run, plan))
                stopped = ""
            except Exception as error:
                stopped = type(error).__name__
                raise
            finally:
                attempt("recording the end of the run", lambda: record_end(plan.folder, stopped))
        except RankTimeout as error:
            if error.diagnosed:
                raise
            raise _diagnosed(error, startup, cluster.run, plan) from error


def _stop(cluster: Cluster) -> None:
    with driver.doing("stopping all processes"):
        cluster.close()
        remove_files(engine_folder(f"{cluster.run}/*"))


def _start(
    config: Config,
    plan: Plan,
    startup: Startup,
    actor_slots: Pool,
    rollout_slots: Pool,
    ending: ExitStack,
    engines_sleep: bool,
) -> tuple[Roles, AbstractContextManager[None]]:
    """Start the processes in the reserved slots, load the models, and connect the roles.

    Raises as `started_roles`.

    Args:
        ending: receives what is done before the processes are stopped.
        engines_sleep: the engines can release their memory also without trainer.colocate.

    Returns:
        The roles, and a context in which engines are restarted.
    """
    on_cpu = plan.device == "cpu"
    threads = cpu_threads(config)
    of_actor, env = (worker_env(on_cpu, chunk_size(config), n_threads=n) for n in threads)
    shares = ", with {} and {} CPU threads a rank".format(*threads) if on_cpu else ""
    n_ranks = actor_slots.spec.world_size
    log.info("starting %d actor ranks and %d rollout engines%s", n_ranks, config.derived.n_engines, shares)
    of_actor |= actor_env(config, on_cpu)
    actor_workers = actor_slots.spawn(ActorWorker, of_actor, concurrency_groups=actor_worker.CONCURRENCY_GROUPS)
    actor = ActorPool(actor_workers, config)
    rollout_workers = rollout_slots.spawn(RolloutWorker, env, concurrency_groups=rollout_worker.CONCURRENCY_GROUPS)
    rollout = RolloutPool(rollout_workers, config, actor.dp_size)
    ending.callback(attempt, "closing the engines", rollout.close)
    ranks = actor_slots.named(actor_workers) | rollout_slots.named(rollout_workers)
    startup.watch(ranks)
    # Each rank reports its GPU before it builds its model; the GPU map is made meanwhile.
    calls = {name: worker.placement.remote(not on_cpu) for name, worker in ranks.items()}
    # Both pools build at the same time; they first need each other for the weight-sync groups.
    building = rollout.init_model(plan.device, plan.eos_ids, sleeps=engines_sleep)
    endpoints = _endpoints(config, plan, actor, actor_slots)  # their processes start meanwhile
    startup.expect([_endpoint_name(i) for i in range(len(endpoints))])
    places = _load_models(config, plan, startup, actor, rollout, building, calls)
    gather({_endpoint_name(i): e.is_up.remote() for i, e in enumerate(endpoints)}, "start", startup.left_s())
    prompts = plan.train_prompts, plan.val_prompts
    init_judging(config, config.derived, *prompts, endpoints, startup.left_s(), plan.tools)
    trim_heap()  # what the checks and the start have used, tokenizers above all
    if config.teacher.signal == "hidden" and not config.derived.teacher_pool:
        heads = teacher_heads(endpoints, actor.last_stage_nodes(startup.left_s()), startup.left_s())
        actor.set_teacher_head(heads, startup.left_s())
    sync = WeightSync(actor.exporters(plan.device), rollout_workers, config, plan.device, startup.left_s())
    engine_slots = EngineSlots(
        rollout_slots,
        env,
        [row for row in places.rows if row.pool == ROLLOUT],
        on_cpu=on_cpu,
        build=rollout.build,
        started=partial(_record_restart, plan, startup),
        timeout_s=config.trainer.init_timeout_s,
    )
    restarts = restarting(rollout.engines, engine_slots, sync.restore_engine, config.rollout)
    pushes = EngineSync(sync, rollout.engines, config.trainer.init_timeout_s)
    roles = _connect(config, plan, actor, rollout, pushes, endpoints)
    return with_judges(roles, config, config.derived, endpoints), restarts


def _load_models(
    config: Config,
    plan: Plan,
    startup: Startup,
    actor: ActorPool,
    rollout: RolloutPool,
    building: Mapping[str, Any],
    calls: Mapping[str, Any],
) -> GpuMap:
    """Load all models on the actor's ranks, wait for the engines, and return the GPU map.

    Args:
        building: calls that build the engines.
        calls: the placements of the ranks.
    """
    if config.trainer.colocate:  # an engine takes its share of the free memory, then sleeps to make room for the actor
        gather(building, "init_model", startup.left_s())
        rollout.offload_states()
        building = {}
    actor.check_run_dir(plan.folder.root, startup.left_s())
    building = {**building, **actor.init_model(plan.device, plan.total_steps, startup.left_s(), plan.comparison)}
    places = record_placement(config, plan.device, plan.folder, calls, startup.left_s())
    gather(building, "init_model", startup.left_s())
    if config.derived.teacher_pool == ACTOR:
        actor.init_teacher(startup.left_s())
    if config.derived.reference_folder:
        actor.init_reference(startup.left_s())
    return places


def _connect(
    config: Config,
    plan: Plan,
    actor: ActorPool,
    rollout: RolloutPool,
    pushes: EngineSync,
    endpoints: Sequence[Any],
) -> Roles:
    """Return the roles with the teacher that teacher.backend selects."""
    timeout_s = config.trainer.stage_timeout_s
    reference = ReferencePool(actor.workers, endpoints, config) if config.derived.loss.has_reference else NoReference()
    if config.derived.teacher_pool == ACTOR:
        return Roles(actor, rollout, LocalScoring(lambda: actor.workers, endpoints, timeout_s), pushes, reference)
    if config.derived.teacher_pool == ROLLOUT:
        local = LocalScoring(rollout.up, endpoints, timeout_s, of="rollout engine")
        return Roles(actor, rollout, local, pushes, reference)
    if config.derived.teacher_pool == NONE:
        return Roles(actor, rollout, NoTeacher(list, endpoints, timeout_s), pushes, reference)
    throttled = [info.n_streams for info in plan.teachers if throttle_warning(config.teacher, info)]
    remark = f"set teacher.max_in_flight to {max(throttled)}" if throttled else ""
    pool = ScoringPool(endpoints, timeout_s)
    return Roles(actor, rollout, pool, pushes, reference, remark, pool.health)


def _record_restart(plan: Plan, startup: Startup, name: str, worker: Any, row: RankPlacement) -> None:
    startup.watch({name: worker})
    record_restart(plan.folder, row)


def _diagnosed(error: RankTimeout, startup: Startup, run: str, plan: Plan) -> RankTimeout:
    """Return the error with a hang report, and log the stacks of the ranks that the others wait for."""
    log.error("%s; collecting the stacks of all ranks", str(error))
    try:
        report = hang_report(run, startup.names, startup.poll(), error.late)
        file = plan.folder.write(STACKS, report.stacks.encode())
    except (GkdError, RayError, RuntimeError, OSError) as trouble:
        log.error("no hang report: %s: %s", type(trouble).__name__, str(trouble))
        return RankTimeout(str(error), error.late, diagnosed=True)
    log.error("stacks of the ranks that the others wait for:\n%s", report.excerpt)
    text = "\n  ".join([str(error), *report.lines, f"stacks of all ranks: {file}"])
    return RankTimeout(text, error.late, diagnosed=True)


def _endpoints(config: Config, plan: Plan, actor: ActorPool, slots: Pool) -> list[Any]:
    """Start one scoring endpoint per data-parallel group, on the node of its last pipeline stage."""
    windows = [window_of_group(config.teacher, info, actor.dp_size) for info in plan.teachers]
    # A thread scores one chunk at a time. One more thread than fills the window, so that it does not run half empty at
    # the end of a chunk.
    n_in_flight = sum(window.n_in_flight for window in windows)
    n_threads = -(-n_in_flight // CHUNK_SIZE) + 1
    if config.derived.teacher_pool:
        return spawn_endpoints(config, actor, slots, plan.device, GroupEndpoint)
    args = (
        plan.comparison,
        [info.fingerprint for info in plan.teachers],
        windows,
        [info.probe for info in plan.teachers],
        [info.numerics for info in plan.teachers],
        [info.model_name for info in plan.teachers],
    )
    return spawn_endpoints(config, actor, slots, plan.device, ScoringEndpoint, *args, n_threads=n_threads)


def spawn_endpoints(
    config: Config, actor: ActorPool, slots: Pool, device: str, kind: type, *args: Any, n_threads: int = 1
) -> list[Any]:
    """Start an endpoint of this class per data-parallel group, on the node of its last pipeline stage."""
    env = worker_env(device == "cpu", chunk_size(config))
    groups = {RECORDS: 1, HEALTH: 1, JUDGING: workers_per_endpoint(config, actor.dp_size)}
    return [
        ray.remote(concurrency_groups=groups)(kind)
        .options(
            num_cpus=HELPER_CPUS,
            max_concurrency=n_threads,
            runtime_env={"env_vars": env | rank_env(slots.run, _endpoint_name(i))},
            scheduling_strategy=slots.near(rank),
        )
        .remote(config, *args)
        for i, rank in enumerate(actor.last_stage_ranks())
    ]


def _endpoint_name(dp_rank: int) -> str:
    return f"scoring endpoint {dp_rank}"
