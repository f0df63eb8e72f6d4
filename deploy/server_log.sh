# Functions that read the JSON log of a flashcore-server. Source it.

# wait_for_server PROCESS LOG SECONDS: returns when the server serves. Fails if its process ends
# first or the time runs out.
wait_for_server() {
  local process=$1 log=$2 tries=$(($3 * 10))
  for ((; tries > 0; --tries)); do
    ! grep -q '"msg":"serving"' "$log" || return 0
    kill -0 "$process" 2>/dev/null || return 1
    sleep 0.1
  done
  return 1
}

# log_field LOG RECORD FIELD: the text of a field in the record with that message.
log_field() { sed -n "/\"msg\":\"$2\"/s/.*\"$3\":\"\([^\"]*\)\".*/\1/p" "$1"; }

# first_address LOG: the first address that the server serves on.
first_address() { log_field "$1" serving addresses | cut -d, -f1; }
