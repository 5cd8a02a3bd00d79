"""The parameters of a promotion, of its approval, of its way back, and of who had the alias."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from mlflow_compress.config import Policy, read_policy
from mlflow_compress.config.declarations import AUTO, EMBEDDED, OptionalText, OrNone, Parameters, option
from mlflow_compress.config.policy import named_alias


def _evaluation_id(value: str) -> str:
    if value != AUTO and not re.fullmatch("[0-9a-f]{6,16}", value):
        raise ValueError("auto, or 6 to 16 hexadecimal digits of an evaluation id")
    return value


Alias = Annotated[str, AfterValidator(named_alias)]
Bound = Annotated[Annotated[float, Field(ge=0)] | None, OrNone]


class PromoteConfig(Parameters):
    """The promote stage: apply gates to ends of intervals, rank by size, move the alias."""

    model: str = option(EMBEDDED, "baseline whose variants compete: 'demo', a folder, or its name as runs show it")
    evaluation: Annotated[str, AfterValidator(_evaluation_id)] = option(
        AUTO, "evaluation id whose variants compete (6 or more digits of it); 'auto' is the one with the most items"
    )
    policy: OptionalText = option(
        None,
        "YAML file of the policy; none: the default policy, which `mlflow-compress promote policy` prints",
        path="file",
    )
    max_kl: Bound = option(None, "largest mean KL (nats), clipped at 1 per item: upper end; none: the policy's (0.05)")
    max_kl_outliers_pct: Bound = option(
        None,
        "largest share of items with a KL above 1 nat, in percent: upper end; none: the policy's (1)",
    )
    max_flips_pct: Bound = option(
        None, "largest share of flipped answers in percent: upper end of its interval; none: the policy's (5)"
    )
    max_accuracy_drop_pct: Bound = option(
        None, "largest accuracy drop in points: upper end of its interval; none: the policy's (2)"
    )
    min_decode_speedup: Bound = option(
        None,
        "smallest decode speed relative to the baseline, one sequence at a time (1.2 is a fifth faster): lower end "
        "of its 95 % interval; none: the policy's (no such gate)",
    )
    max_memory_ratio: Bound = option(
        None,
        "largest peak memory while serving, relative to the baseline (0.5 is half): upper end of its 95 % interval; "
        "none: the policy's (no such gate)",
    )
    alias: Alias = option("champion", "registry alias that moves to the winner")
    needs: Literal["none", "approval"] = option(
        "none", "'approval': the winner waits until `mlflow-compress promote approve` moves the alias to it"
    )
    waiver: OptionalText = option(
        None, "YAML file that waives one requirement: {requirement, reason, person, until: 2027-01-31}", path="file"
    )
    dry_run: bool = option(False, "only show the decision; nothing is registered, logged or moved")

    def read_policy(self) -> Policy:
        return read_policy(self.policy).overridden(
            max_kl=self.max_kl,
            max_kl_outliers_pct=self.max_kl_outliers_pct,
            max_flips_pct=self.max_flips_pct,
            max_accuracy_drop_pct=self.max_accuracy_drop_pct,
            min_decode_speedup=self.min_decode_speedup,
            max_memory_ratio=self.max_memory_ratio,
        )


class ApproveConfig(Parameters):
    """Approve a waiting version: it gets its alias if its decision is still valid."""

    version: OptionalText = option(None, "the waiting version, as `mlflow-compress promote history` shows it")
    by: OptionalText = option(None, "name of the person who approves")
    model: str = option(EMBEDDED, "baseline: 'demo', a folder, or its name as runs show it")
    reason: OptionalText = option(None, "why, in your words; stored with the run")
    policy: OptionalText = option(
        None, "YAML file that must equal the decision's policy; none: the policy in the decision's run", path="file"
    )


class RollbackConfig(Parameters):
    """Move an alias back to the version that had it before."""

    model: str = option(EMBEDDED, "baseline: 'demo', a folder, or its name as runs show it")
    alias: Alias = option("champion", "registry alias that moves back")
    reason: OptionalText = option(None, "why, in your words; stored with the run")


class HistoryConfig(Parameters):
    """Show which version had an alias when, by which decision and policy."""

    model: str = option(EMBEDDED, "baseline: 'demo', a folder, or its name as runs show it")
    alias: Alias = option("champion", "registry alias")
