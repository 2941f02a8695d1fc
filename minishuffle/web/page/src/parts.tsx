// Small parts that several views use.
import type { ComponentChildren } from "preact";
import type { Level } from "./api";
import { level, percent, tone, words } from "./format";

const MARKS = { good: "●", plain: "✓", warn: "▲", bad: "■", idle: "○" };

export function State({ state }: { state: string }) {
  const kind = tone(state);
  return (
    <span class={`state ${kind}`}>
      <span aria-hidden="true">{MARKS[kind]}</span> {words(state)}
    </span>
  );
}

const LEVEL_MARKS: Record<Level, string> = { OK: "●", LOW: "▲", HIGH: "■", BEHIND: "■" };

export function LevelBadge({ of }: { of: Level }) {
  return (
    <span class={`level ${of.toLowerCase()}`} title={of === "BEHIND" ? "takes less than is sent to it" : `back-pressure: ${of}`}>
      <span aria-hidden="true">{LEVEL_MARKS[of]}</span> {of}
    </span>
  );
}

/** A share of time as a bar with its number. */
export function Share({ value, kind }: { value: number; kind: "busy" | "pressure" }) {
  const style = kind === "pressure" ? level(value).toLowerCase() : "busy";
  return (
    <span class="share">
      <span class="track" aria-hidden="true">
        <span class={`fill ${style}`} style={{ width: `${Math.min(100, value * 100)}%` }} />
      </span>
      <span class="number">{percent(value)}</span>
    </span>
  );
}

export function Section(props: { title: string; note?: ComponentChildren; id?: string; children: ComponentChildren }) {
  return (
    <section class="card" id={props.id}>
      <header>
        <h2>{props.title}</h2>
        {props.note !== undefined && <p class="note">{props.note}</p>}
      </header>
      {props.children}
    </section>
  );
}

export function Empty({ children }: { children: ComponentChildren }) {
  return <p class="empty">{children}</p>;
}

export function Facts({ facts }: { facts: [string, ComponentChildren][] }) {
  return (
    <dl class="facts">
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

/** A table that scrolls by itself where it is too wide. */
export function Table({ label, children, tall }: { label: string; children: ComponentChildren; tall?: boolean }) {
  return (
    <div class={tall ? "scroll tall" : "scroll"} role="region" aria-label={label} tabIndex={0}>
      <table>{children}</table>
    </div>
  );
}

/** A small line of values; gaps where there is none. */
export function Spark({ values, label }: { values: (number | null)[]; label: string }) {
  const most = Math.max(...values.map((value) => value ?? 0), 1e-9);
  const width = 120;
  const height = 24;
  const pieces: string[] = [];
  let pen = "M";
  values.forEach((value, number) => {
    if (value === null) {
      pen = "M";
      return;
    }
    const x = (number / Math.max(1, values.length - 1)) * width;
    pieces.push(`${pen}${x.toFixed(1)} ${(height - 2 - (value / most) * (height - 4)).toFixed(1)}`);
    pen = "L";
  });
  return (
    <svg class="spark" viewBox={`0 0 ${width} ${height}`} role="img" aria-label={label} preserveAspectRatio="none">
      <path d={pieces.join("")} />
    </svg>
  );
}
