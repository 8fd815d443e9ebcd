# Without the first variable it names its version before the system message; the others keep it from the network and let
# root use its tools.
export CLAUDE_CODE_ATTRIBUTION_HEADER=0 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 IS_SANDBOX=1
claude --print --dangerously-skip-permissions "$1"
cat answer.txt
