{{- /*
The way to Redis inside a proxy, as parts of Envoy's configuration:

  filter --gRPC stream--> cluster meshquota_tunnel --> internal listener meshquota_tunnel
         --RESP over TCP--> cluster meshquota_redis --> Redis

With Envoy's own Redis client the listener leads to the cluster and the internal listener meshquota_redis_proxy first.
*/ -}}

{{- /* What there is, in JSON: the kind of each part, its name, and the template below that renders it. */ -}}
{{- define "meshquota.parts" -}}
{{- $parts := list
  (dict "kind" "Listener" "name" "meshquota_tunnel" "template" "meshquota.listener.tunnel")
  (dict "kind" "Cluster" "name" "meshquota_tunnel" "template" "meshquota.cluster.tunnel")
  (dict "kind" "Cluster" "name" "meshquota_redis" "template" "meshquota.cluster.redis")
-}}
{{- if ne .Values.redis.mode "direct" -}}
{{- $parts = concat $parts (list
  (dict "kind" "Listener" "name" "meshquota_redis_proxy" "template" "meshquota.listener.redisProxy")
  (dict "kind" "Cluster" "name" "meshquota_redis_proxy" "template" "meshquota.cluster.redisProxy")
) -}}
{{- end -}}
{{- toJson $parts -}}
{{- end -}}

{{- define "meshquota.listener.tunnel" -}}
name: meshquota_tunnel
internal_listener: {}
filter_chains:
- filters:
  - name: envoy.filters.network.http_connection_manager
    typed_config:
      "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
      stat_prefix: meshquota_tunnel
      codec_type: HTTP2
      # One stream a worker stays open for as long as the worker lives.
      stream_idle_timeout: 0s
      generate_request_id: false
      route_config:
        virtual_hosts:
        - name: redis
          domains: ["*"]
          routes:
          - match: {prefix: "/"}
            route:
              cluster: {{ eq .Values.redis.mode "direct" | ternary "meshquota_redis" "meshquota_redis_proxy" }}
              timeout: 0s
              # Turns the stream's body into the bytes of a TCP connection.
              upgrade_configs:
              - upgrade_type: CONNECT
                connect_config: {allow_post: true}
      http_filters:
      - name: envoy.filters.http.lua
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua
          default_source_code:
            inline_string: |
              {{- .Files.Get "files/tunnel.lua" | trimSuffix "\n" | nindent 14 }}
      - name: envoy.filters.http.router
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
          suppress_envoy_headers: true
{{- end -}}

{{- define "meshquota.cluster.tunnel" -}}
name: meshquota_tunnel
connect_timeout: 1s
typed_extension_protocol_options:
  envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
    "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
    explicit_http_config:
      http2_protocol_options: {}
{{ include "meshquota.internalEndpoint" "meshquota_tunnel" }}
{{- end -}}

{{- define "meshquota.cluster.redis" -}}
{{- $redis := .Values.redis -}}
name: meshquota_redis
connect_timeout: 1s
{{- if eq $redis.mode "cluster" }}
lb_policy: CLUSTER_PROVIDED
cluster_type:
  name: envoy.clusters.redis
  typed_config:
    "@type": type.googleapis.com/envoy.extensions.clusters.redis.v3.RedisClusterConfig
    # The map of slots is asked for so often, and at once after a redirection.
    cluster_refresh_rate: 5s
    cluster_refresh_timeout: 1s
    redirect_refresh_interval: 0.5s
    redirect_refresh_threshold: 1
    failure_refresh_threshold: 1
{{- else }}
type: STRICT_DNS
{{- end }}
{{- if eq $redis.mode "direct" }}
upstream_connection_options:
  # Finds a peer that vanished without a word, while the connection is idle.
  tcp_keepalive: {keepalive_time: 30, keepalive_interval: 5, keepalive_probes: 3}
{{- else if $redis.passwordVariable }}
typed_extension_protocol_options:
  envoy.filters.network.redis_proxy:
    "@type": type.googleapis.com/envoy.extensions.filters.network.redis_proxy.v3.RedisProtocolOptions
    {{- with $redis.username }}
    auth_username: {inline_string: {{ toJson . }}}
    {{- end }}
    auth_password: {environment_variable: {{ toJson $redis.passwordVariable }}}
{{- end }}
{{- if $redis.tls.enabled }}
{{- $name := $redis.tls.serverName | default $redis.host | toJson }}
transport_socket:
  name: envoy.transport_sockets.tls
  typed_config:
    "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
    sni: {{ $name }}
    common_tls_context:
      validation_context:
        trusted_ca: {filename: {{ toJson $redis.tls.caFile }}}
        match_typed_subject_alt_names:
        - san_type: DNS
          matcher: {exact: {{ $name }}}
{{- end }}
load_assignment:
  cluster_name: meshquota_redis
  endpoints:
  - lb_endpoints:
    {{- range eq $redis.mode "cluster" | ternary $redis.nodes (list $redis) }}
    - endpoint:
        address:
          socket_address: {address: {{ toJson .host }}, port_value: {{ .port | default 6379 | int }}}
    {{- end }}
{{- end -}}

{{- define "meshquota.listener.redisProxy" -}}
name: meshquota_redis_proxy
internal_listener: {}
filter_chains:
- filters:
  - name: envoy.filters.network.redis_proxy
    typed_config:
      "@type": type.googleapis.com/envoy.extensions.filters.network.redis_proxy.v3.RedisProxy
      stat_prefix: meshquota_redis
      settings:
        op_timeout: {{ .Values.redis.opTimeout }}
        {{- if eq .Values.redis.mode "cluster" }}
        # The braces in keys say which belong together, as in Redis Cluster itself.
        enable_hashtagging: true
        # MOVED and ASK are followed here. A replica has no part in it: a charge is a write.
        enable_redirection: true
        read_policy: MASTER
        {{- end }}
      prefix_routes:
        catch_all_route: {cluster: meshquota_redis}
{{- end -}}

{{- define "meshquota.cluster.redisProxy" -}}
name: meshquota_redis_proxy
connect_timeout: 1s
{{ include "meshquota.internalEndpoint" "meshquota_redis_proxy" }}
{{- end -}}

{{- define "meshquota.internalEndpoint" -}}
load_assignment:
  cluster_name: {{ . }}
  endpoints:
  - lb_endpoints:
    - endpoint:
        address:
          envoy_internal_address: {server_listener_name: {{ . }}}
{{- end -}}
