// Lines of the last ten minutes, or of the last minutes if there are no more.
import uPlot from "uplot";
import { useEffect, useRef, useState } from "preact/hooks";

export interface Line {
  name: string;
  values: (number | null)[];
  /** The name of a colour in style.css. */
  colour: string;
  dash?: number[];
}

const HEIGHT = 140;
const SPANS = [60, 120, 300, 600];
/** Marks on the time axis, in shares of the span. */
const TICKS = [0, 0.2, 0.4, 0.6, 0.8];

/** The least span, in seconds, that all samples fit into. */
function spanOf(at: number[]): number {
  const passed = at.length === 0 ? 0 : at[at.length - 1]! - at[0]!;
  return SPANS.find((each) => passed <= each) ?? SPANS[SPANS.length - 1]!;
}

const ago = (seconds: number): string => (seconds < 60 || seconds % 60 !== 0 ? `−${seconds} s` : `−${seconds / 60} min`);

function useScheme(): string {
  const query = matchMedia("(prefers-color-scheme: dark)");
  const [dark, set] = useState(query.matches);
  useEffect(() => {
    const look = () => set(query.matches);
    query.addEventListener("change", look);
    return () => query.removeEventListener("change", look);
  }, []);
  return dark ? "dark" : "light";
}

export function Chart(props: {
  title: string;
  at: number[];
  lines: Line[];
  show: (value: number) => string;
  top?: number;
}) {
  const { title, at, lines, show, top } = props;
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const scheme = useScheme();
  const names = lines.map((line) => line.name).join("\n");

  useEffect(() => {
    const element = place.current!;
    const colour = (name: string) => resolved(element, name);
    const axis = {
      stroke: colour("quiet"),
      grid: { stroke: colour("line"), width: 1 },
      ticks: { show: false },
      font: `11px ${getComputedStyle(element).fontFamily}`,
    };
    const made = new uPlot(
      {
        width: element.clientWidth,
        height: HEIGHT,
        legend: { show: false },
        cursor: { drag: { x: false, y: false }, points: { size: 5 } },
        scales: {
          x: {
            range: (shown, __, last) => {
              const now = last ?? Date.now() / 1000;
              return [now - spanOf(shown.data[0] as number[]), now];
            },
          },
          // Below 4, marks would be fractions that look the same without their decimals.
          y: { range: (_, __, most) => [0, top ?? Math.max(most ?? 0, 4) * 1.1] },
        },
        axes: [
          {
            ...axis,
            size: 28,
            splits: (_, __, first, last) => TICKS.map((share) => last - share * (last - first)),
            values: (_, times) => times.map((time, number) => (number === 0 ? "now" : ago(Math.round(times[0]! - time)))),
          },
          { ...axis, size: 56, values: (_, values) => values.map((value) => show(value)) },
        ],
        series: [
          {},
          ...lines.map((line) => ({
            label: line.name,
            stroke: colour(line.colour),
            width: 1.8,
            dash: line.dash,
            points: { show: false },
          })),
        ],
      },
      data(at, lines),
      element,
    );
    plot.current = made;
    const watch = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height: HEIGHT }));
    watch.observe(element);
    return () => {
      watch.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [names, scheme]);

  useEffect(() => {
    plot.current?.setData(data(at, lines));
  }, [at, lines]);

  return (
    <figure class="chart">
      <figcaption>
        <strong>{title}</strong>
        <ul>
          {lines.map((line) => (
            <li key={line.name}>
              <svg width="22" height="8" aria-hidden="true">
                <path class={line.colour} d="M0 4H22" stroke-dasharray={line.dash?.join(" ")} />
              </svg>
              {line.name} <span class="number">{lastOf(line.values, show)}</span>
            </li>
          ))}
        </ul>
      </figcaption>
      <div ref={place} role="img" aria-label={`${title}: ${lines.map((line) => `${line.name} ${lastOf(line.values, show)}`).join(", ")}`} />
    </figure>
  );
}

/** A canvas does not know variables, nor light-dark(). */
function resolved(element: HTMLElement, name: string): string {
  element.style.color = `var(--${name})`;
  const found = getComputedStyle(element).color;
  element.style.color = "";
  return found;
}

function data(at: number[], lines: Line[]): uPlot.AlignedData {
  return [at, ...lines.map((line) => line.values)];
}

function lastOf(values: (number | null)[], show: (value: number) => string): string {
  const last = values.at(-1);
  return last === undefined || last === null ? "–" : show(last);
}
