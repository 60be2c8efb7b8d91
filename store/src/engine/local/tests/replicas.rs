//! Several processes, each of which holds what is put to it.

use super::*;

/// One of several processes. Each random number is its session id.
struct MultiHost(u128);

impl MultiHost {
    fn peers(own: u128) -> Peers {
        Peers { replica_locator: Arc::new(Self(own)), ..Peers::default() }
    }
}

#[async_trait]
impl ReplicaLocator for MultiHost {
    fn is_multi_host(&self) -> bool {
        true
    }

    async fn hosts(&self) -> Result<Vec<(SessionId, String)>> {
        Ok(vec![(SessionId(7), "here".to_owned()), (SessionId(8), "there".to_owned())])
    }

    async fn resolve(
        &self,
        _folder: &str,
        _version: &Version,
        _own: SessionId,
    ) -> Result<ResolvedReplicas> {
        Ok(ResolvedReplicas::default())
    }
}

impl Environment for MultiHost {
    fn now(&self) -> Timestamp {
        Timestamp(0)
    }

    fn random_id(&self) -> u128 {
        self.0
    }
}

#[tokio::test]
async fn session_is_visible_from_begin_to_end() {
    let ledgers = SharedLedgers::new(Arc::new(MemoryMeta::default()));
    let (shared, volume) = (Arc::new(ledgers.clone()), Arc::new(MemoryVolume::default()));
    let controller =
        LocalController::with_peers(shared, volume, MultiHost::peers(7), Arc::new(MultiHost(7)));
    let own = SessionId(7);
    assert!(ledgers.has_ended(own).await.unwrap());
    controller.begin_session().await.unwrap();
    assert!(!ledgers.has_ended(own).await.unwrap());
    let hosts = controller.hosts().await.unwrap();
    let hosts: Vec<_> = hosts.iter().map(|it| (it.address.as_str(), it.is_self)).collect();
    assert_eq!(hosts, [("here", true), ("there", false)]);
    controller.end_session().await;
    assert!(ledgers.has_ended(own).await.unwrap());
    // A put to a process that others do not find would be lost for them.
    let (key, proposal) =
        (Key::new("policy").unwrap(), Proposal::single_writer(1, Durability::Memory));
    let error = controller.open(&key, &proposal, || true).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    let patient = Proposal { timeout: Duration::from_mins(1), ..proposal };
    let mut open = std::pin::pin!(controller.open(&key, &patient, || true));
    tokio::time::timeout(Duration::from_millis(20), &mut open).await.unwrap_err();
    let _found = ledgers.begin_session(own).await.unwrap();
    open.await.unwrap();
}

#[tokio::test]
async fn replicas_are_recorded_and_released() {
    let (ledgers, volume) =
        (SharedLedgers::new(Arc::new(MemoryMeta::default())), MemoryVolume::default());
    let among = |own| {
        let (ledgers, volume) = (Arc::new(ledgers.clone()), Arc::new(volume.clone()));
        LocalController::with_peers(
            ledgers,
            volume,
            MultiHost::peers(own),
            Arc::new(MultiHost(own)),
        )
    };
    let (shared, kept) = (Arc::new(ledgers.clone()), Arc::new(volume.clone()));
    let single_host = LocalController::new(shared, kept, Arc::new(SystemEnvironment));
    let (one, other) = (among(7), among(8));
    let key = Key::new("policy").unwrap();
    one.retain(&key, std::num::NonZeroU32::new(9).unwrap(), None).await.unwrap();
    let mut paths = Vec::new();
    // Archives of the second controller have no holder: every process finds them in the volume.
    for (number, controller) in [(1, &one), (2, &single_host)] {
        let proposal = Proposal::single_writer(number, Durability::Memory);
        let (place, _) = controller.open(&key, &proposal, || true).await.unwrap();
        let (digest, len) = write_archive(&volume, &place);
        assert!(controller.commit(&place, digest, &[len]).await.unwrap().visible);
        paths.push(place.path(0));
    }
    let holders = async || {
        let state = single_host.state(&key).await.unwrap();
        let versions = state.visible().map(|version| {
            let of: Vec<_> =
                version.contributions.values().flat_map(Contribution::replica_sessions).collect();
            of.iter().map(|session| session.0).collect::<Vec<_>>()
        });
        versions.collect::<Vec<_>>()
    };
    let publish = async |controller: &LocalController, here: &[String]| {
        let here: BTreeSet<String> = here.iter().cloned().collect();
        controller.publish_replicas(&key, &|| here.clone()).await.unwrap();
        holders().await
    };
    assert_eq!(publish(&other, &[]).await, [vec![7], vec![]]);
    assert_eq!(publish(&other, &paths).await, [vec![7, 8], vec![]]);
    assert_eq!(publish(&other, &paths).await, [vec![7, 8], vec![]]);
    assert_eq!(publish(&one, &paths).await, [vec![7, 8], vec![]]);
    assert_eq!(publish(&other, &[]).await, [vec![7], vec![]]);
    // The last holder is not removed.
    assert_eq!(publish(&one, &[]).await, [vec![7], vec![]]);
}

#[tokio::test]
async fn contributions_of_ended_process_are_withdrawn() {
    let ledgers = SharedLedgers::new(Arc::new(MemoryMeta::default()));
    let volume = MemoryVolume::default();
    let among = |own| {
        let (ledgers, volume) = (Arc::new(ledgers.clone()), Arc::new(volume.clone()));
        LocalController::with_peers(
            ledgers,
            volume,
            MultiHost::peers(own),
            Arc::new(MultiHost(own)),
        )
    };
    let (one, other, key) = (among(7), among(8), Key::new("policy").unwrap());
    let proposal = Proposal::single_writer(1, Durability::Memory);
    let (place, _) = one.open(&key, &proposal, || true).await.unwrap();
    write_archive(&volume, &place);
    for (is_there, left) in [(true, 1), (false, 0)] {
        if !is_there {
            one.end_session().await;
        }
        other.maintain(&key).await.unwrap();
        assert_eq!(other.state(&key).await.unwrap().open().count(), left);
        assert_eq!(volume.open(&place.path(0)).unwrap().is_some(), is_there);
    }
}

#[tokio::test]
async fn follow_requires_daemon() {
    let (controller, key) = (HookedVolume::default().controller(), Key::new("policy").unwrap());
    let unread = controller.wait_until_read(&key, 0, Duration::ZERO).await.unwrap_err();
    let follow = controller.follow(&key).await.map(drop).unwrap_err();
    assert_eq!([unread.kind(), follow.kind()], [ErrorKind::Unsupported; 2]);
    assert!(controller.is_open() && !controller.supports_device_memory());
}
