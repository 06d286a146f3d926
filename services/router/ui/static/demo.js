// Kills or drains a worker of `baton up --demo`. The router refuses it everywhere else.
import { json } from "./client.js";

/** @param {"kill" | "drain"} action @param {string} worker */
export async function act(action, worker) {
  try {
    await json("v1/cluster/actions", {
      method: "POST", headers: { "content-type": "application/json", "x-baton-demo": "1" }, body: JSON.stringify({ action, worker }),
    });
  } catch (error) {
    dispatchEvent(new CustomEvent("baton-notice", { detail: `${action} ${worker}: ${error.message}` }));
  }
}
