"""A taskset of the library verifiers with several players: a duel. Imported by name."""

import verifiers.v1 as vf

__all__ = ["DuelEnv", "DuelTaskset"]


class DuelData(vf.TaskData):
    pass


class DuelTask(vf.Task[DuelData]):
    pass


class DuelEnvConfig(vf.EnvConfig):
    north: vf.AgentConfig = vf.AgentConfig(harness={"id": "verifiers_reverse"})
    south: vf.AgentConfig = vf.AgentConfig(harness={"id": "verifiers_reverse"})
    souths: int = 1


class DuelEnv(vf.Env[DuelEnvConfig]):
    """Each is asked once; north is paid 3 and its own length as a metric, each south -3."""

    async def run(self, task, agents):
        def asked(who):
            return vf.Task(vf.TaskData(idx=task.data.idx, prompt=f"You are {who}."))

        traces = [await agents.north.run(asked("north"))]
        traces += [await agents.south.run(asked("south")) for _ in range(self.config.souths)]
        for number, trace in enumerate(traces):
            trace.record_reward("payoff", -3.0 if number else 3.0)
            trace.record_metric("number", float(number))


class DuelTaskset(vf.Taskset[DuelTask, vf.TasksetConfig]):
    def load(self):
        for number in range(8):
            yield DuelTask(DuelData(idx=number, name=f"duel {number}", prompt=None))
