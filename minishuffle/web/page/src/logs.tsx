// What a job has logged: the lines of its print sinks, and its dead letters.
import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Job } from "./api";
import { useLog } from "./api";
import { count } from "./format";
import { Empty, Section } from "./parts";

const LINES_SHOWN = 300;
const LETTER = "dead letter: ";
/** Pixels from the end at which the list still follows. */
const NEAR = 40;

export function Log({ job }: { job: Job }) {
  const { lines, left } = useLog(job.job);
  const [wanted, want] = useState("");
  const [letters, onlyLetters] = useState(false);
  const found = useMemo(() => {
    const text = wanted.trim().toLowerCase();
    return lines.filter((line) => (!letters || line.text.startsWith(LETTER)) && line.text.toLowerCase().includes(text));
  }, [lines, wanted, letters]);
  const written = job.tasks.reduce((sum, task) => sum + (task.counters.user_errors.dead_letter ?? 0), 0);
  const shown = found.slice(-LINES_SHOWN);
  return (
    <Section title="Log" id="log" note={noteOf(lines.length, left, written)}>
      {lines.length === 0 ? (
        <Empty>No lines: print sinks and dead letters (on_error="dead_letter") write some.</Empty>
      ) : (
        <>
          <div class="filters">
            <label class="field search">
              <span>Find in the log</span>
              <input type="search" value={wanted} onInput={(event) => want(event.currentTarget.value)} />
            </label>
            <label class="tick">
              <input type="checkbox" checked={letters} onChange={(event) => onlyLetters(event.currentTarget.checked)} /> Dead letters only
            </label>
          </div>
          {found.length > shown.length && (
            <Empty>
              the last {count(shown.length)} of {count(found.length)} lines that match
            </Empty>
          )}
          {found.length === 0 ? <Empty>No line matches.</Empty> : <Lines lines={shown} />}
        </>
      )}
    </Section>
  );
}

function noteOf(kept: number, left: number, letters: number): string | undefined {
  const parts = [];
  if (letters > 0) parts.push(`${count(letters)} dead ${letters === 1 ? "letter" : "letters"}`);
  if (left > 0) parts.push(`the last ${count(kept)} lines; ${count(left)} earlier ones are not kept`);
  return parts.length > 0 ? parts.join("; ") : undefined;
}

/** The newest at the end, which stays in sight unless somebody has scrolled back. */
function Lines({ lines }: { lines: { number: number; text: string }[] }) {
  const place = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  useLayoutEffect(() => {
    const element = place.current;
    if (element !== null && follows.current) element.scrollTop = element.scrollHeight;
  }, [lines]);
  return (
    <div
      ref={place}
      class="scroll tall"
      role="region"
      aria-label="Lines of the log, the newest last"
      tabIndex={0}
      onScroll={(event) => {
        const { scrollTop, clientHeight, scrollHeight } = event.currentTarget;
        follows.current = scrollTop + clientHeight >= scrollHeight - NEAR;
      }}
    >
      <ol class="log">
        {lines.map(({ number, text }) => (
          <li key={number}>
            {text.startsWith(LETTER) ? (
              <>
                <span class="alert">
                  <span aria-hidden="true">▲</span> dead letter
                </span>{" "}
                {text.slice(LETTER.length)}
              </>
            ) : (
              text
            )}
          </li>
        ))}
      </ol>
    </div>
  );
}
