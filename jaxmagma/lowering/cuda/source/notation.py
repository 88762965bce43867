"""A plan in mathematical notation: the comment that a kernel begins with."""

from jaxmagma.plans.plan import Plan, Pointwise, Product, Rearrange, Step


def lines_of(plan: Plan) -> list[str]:
    """A line for each step, with the shape of its result."""
    return [
        f"%{number}{_formula(step)}  ({'x'.join(str(x) for x in step.shape) or 'scalar'})"
        for number, step in plan.numbered_steps()
    ]


def _formula(step: Step) -> str:
    if isinstance(step, Product):
        over = f"sum_{step.contracted} " if step.contracted else ""
        factors = f"%{step.left}[{step.left_labels}] %{step.right}[{step.right_labels}]"
        return f"[{step.output_labels}] = {over}{factors}"
    if isinstance(step, Rearrange):
        return f"[{step.output_labels}] = %{step.operand}[{step.labels}]"
    if isinstance(step, Pointwise):
        terms = zip(step.operands, step.labels, strict=True)
        operands = ", ".join(f"%{x}[{labels}]" for x, labels in terms)
        return f"[{step.output_labels}] = {step.function}({operands})"
    return f" = {step!r}"
