// The rows that flow on an edge: a sample, taken when somebody with the token asks for it.
import { useRef, useState } from "preact/hooks";
import type { EdgeRow, EdgeRows, Graph } from "./api";
import { change, keepToken, keptToken, Refused } from "./api";
import { TokenField } from "./cancel";
import { count, instant } from "./format";
import { Table } from "./parts";

const WAIT_SECONDS = 10;
const ANSWER_MS = 4000 + WAIT_SECONDS * 1000;
const ROWS = 20;
const NOT_ALLOWED = 401;

/** The edges that leave a vertex, and of each a button that shows its next rows. */
export function Outputs({ job, number, graph }: { job: string; number: number; graph: Graph }) {
  const edges = graph.edges.map((edge, place) => ({ ...edge, place })).filter((edge) => edge.source === number);
  if (edges.length === 0) return null;
  return (
    <>
      <h3>Rows that leave it</h3>
      {edges.map((edge) => (
        <Edge key={edge.place} job={job} edge={edge.place} graph={graph} />
      ))}
    </>
  );
}

function Edge({ job, edge, graph }: { job: string; edge: number; graph: Graph }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const [token, setToken] = useState(keptToken() ?? "");
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState("");
  const [refused, setRefused] = useState("");
  const [found, setFound] = useState<EdgeRows | null>(null);
  const ends = graph.edges[edge]!;
  const [from, to] = [graph.vertices[ends.source]!.name, graph.vertices[ends.target]!.name];

  async function look(given: string) {
    setBusy(true);
    setError("");
    setRefused("");
    dialog.current?.close();
    try {
      setFound(await change<EdgeRows>(`jobs/${job}/tap?edge=${edge}&seconds=${WAIT_SECONDS}`, given, ANSWER_MS));
      keepToken(given);
    } catch (failed) {
      const text = failed instanceof Error ? failed.message : String(failed);
      if (failed instanceof Refused && failed.status === NOT_ALLOWED) {
        setRefused(text);
        dialog.current?.showModal();
      } else setError(text);
    }
    setBusy(false);
  }

  function ask() {
    const kept = keptToken();
    if (kept !== null) void look(kept);
    else dialog.current?.showModal();
  }

  return (
    <>
      <p class="edge-line">
        <span>
          to <strong>{to}</strong> ({ends.partitioner})
        </span>
        <button type="button" disabled={busy} onClick={ask} aria-label={`Show rows for ${to}`}>
          Show rows
        </button>
        <span class="quiet" role="status">
          {busy ? `waiting for the next ${ROWS} rows, for ${WAIT_SECONDS} s at most …` : found !== null && error === "" ? summary(found) : ""}
        </span>
      </p>
      {error !== "" && (
        <p class="failure" role="alert">
          {error}
        </p>
      )}
      {found !== null && found.rows.length > 0 && <Rows rows={found.rows} from={from} to={to} />}
      <dialog ref={dialog} aria-labelledby={`tap-title-${edge}`}>
        <form
          onSubmit={(event) => {
            event.preventDefault();
            void look(token.trim());
          }}
        >
          <h3 id={`tap-title-${edge}`}>
            Show rows from {from} to {to}?
          </h3>
          <p>The next {ROWS} rows are copied, as text, and shown to you alone. The job goes on meanwhile.</p>
          <TokenField token={token} set={setToken} />
          {refused !== "" && (
            <p class="failure" role="alert">
              {refused}
            </p>
          )}
          <p class="buttons">
            <button type="button" onClick={() => dialog.current?.close()}>
              Show none
            </button>
            <button type="submit" disabled={token.trim() === ""}>
              Show rows
            </button>
          </p>
        </form>
      </dialog>
    </>
  );
}

function summary(found: EdgeRows): string {
  const silent = found.silent.length > 0 ? `; worker ${found.silent.join(", ")} did not answer` : "";
  if (found.rows.length >= ROWS) return `the next ${ROWS} rows${silent}`;
  const rows = found.rows.length === 0 ? "no row" : found.rows.length === 1 ? "1 row" : `${count(found.rows.length)} rows`;
  return `${rows} within ${WAIT_SECONDS} s${silent}`;
}

function Rows({ rows, from, to }: { rows: EdgeRow[]; from: string; to: string }) {
  const columns = rows[0]!.columns;
  const timed = rows.some((row) => row.time !== null);
  const keyed = rows.some((row) => row.key !== null);
  return (
    <Table label={`Rows from ${from} to ${to}`} tall>
      <thead>
        <tr>
          <th>Written</th>
          <th class="number">From</th>
          <th class="number">To</th>
          {timed && <th>Event time</th>}
          {keyed && <th class="value">Key</th>}
          {columns.length > 0 ? (
            columns.map((column, place) => (
              <th key={place} class="value">
                {column}
              </th>
            ))
          ) : (
            <th class="wide">Row</th>
          )}
        </tr>
      </thead>
      <tbody>
        {rows.map((row, place) => (
          <tr key={place}>
            <td>
              <time>{instant(row.at)}</time>
            </td>
            <td class="number">{row.producer}</td>
            <td class="number">{row.consumer ?? "all"}</td>
            {timed && <td>{row.time === null ? "–" : <time>{instant(row.time / 1e6)}</time>}</td>}
            {keyed && (
              <td class="value">
                <code>{row.key ?? "–"}</code>
              </td>
            )}
            {row.values.map((value, column) => (
              <td key={column} class={columns.length > 0 ? "value" : "wide"}>
                <code>{value}</code>
              </td>
            ))}
          </tr>
        ))}
      </tbody>
    </Table>
  );
}
